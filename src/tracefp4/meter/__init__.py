"""`tracefp4 meter`: where two log-probs of the same token come apart, by site and layer, or from two trace files."""
