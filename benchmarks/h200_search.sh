#!/usr/bin/env bash
# Which settings of a rung keep the BF16 control stable: short runs side by side, a line each, on a machine that is lent
# for minutes.
#
#   benchmarks/h200_search.sh RUNG OUT_DIR [OPTIONS OF tracefp4 reproduce search ...]
#
# OUT_DIR    gets RUNG.txt (the table) and starts.tar.gz (the warm starts that are complete)
# STARTS     starts.tar.gz of an earlier call, put back first: a warm start is made once
# MINUTES    until all runs stop (5)
# JOBS       processes that share the GPU (12 on 16 cores)
#
# The same command goes on where its runs stood as long as the machine is the same; more --vary values may join.
# Exit code: 0 all runs are done, 4 call again, anything else is an error.
#
# A first call for a rung, its warm start included, and a second one with the longer band and other rates:
#   benchmarks/h200_search.sh ladder-6 out --vary train.lr=2.5e-5,5e-5,1e-4 --vary train.updates_per_rollout=1,4
#   benchmarks/h200_search.sh ladder-6 out --vary 'start.stop.pass_rate_low=0.4 start.stop.pass_rate_high=0.6'
set -uo pipefail

[ $# -ge 2 ] || { sed -n '2,/^set/p' "$0" | grep '^#' | cut -c3-; exit 2; }
rung=$1 out=$2
shift 2
mkdir -p "$out" runs/reproduce
if [ -n "${STARTS:-}" ]; then
  tar -xzf "$STARTS" -C runs/reproduce || exit
fi
name=$(basename "$rung" .toml)
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"
"$(dirname "$0")/with_mps.sh" "${PYTHON:-python3}" -m tracefp4 reproduce search "$rung" \
  --out "runs/reproduce/search-$name" --max-minutes "${MINUTES:-5}" --jobs "${JOBS:-12}" "$@" | tee "$out/$name.txt"
code=${PIPESTATUS[0]}
(cd runs/reproduce && find starts -name warmstart.json -printf '%h\0' 2>/dev/null | tar -czf - --null -T -) >"$out/starts.tar.gz"
exit "$code"
