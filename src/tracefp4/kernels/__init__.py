"""One folder per op: ``ref.py`` is the truth in plain torch; faster backends must equal it."""
