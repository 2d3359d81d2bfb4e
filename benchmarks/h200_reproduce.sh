#!/usr/bin/env bash
# One call of a reproduction on a machine that is lent for minutes: goes on where the last call stood, stops in time, and
# leaves a pack of the state for the next machine.
#
#   benchmarks/h200_reproduce.sh EXPERIMENT OUT_DIR [PACK_DIR] [OPTIONS OF tracefp4 reproduce ...]
#
# OUT_DIR    gets pack/ (parts of at most 15 MB, together at most MB), results.md and results.json
# PACK_DIR   the pack/ of an earlier call, or - for none; read where this machine holds no runs yet
# MINUTES    until all runs stop (8: leaves a minute for states, tables and the pack within a call of 10)
# JOBS       runs that share the GPU (12 on 16 cores: a run is one process, busy on the CPU between kernels)
# MB         most that the pack may take (50)
# STARTS     starts.tar.gz of h200_search.sh, put back first where it is set
#
# Exit code: 0 all runs are done, 4 call again, anything else is an error. The first line of a run tells its seconds a step
# as soon as three steps are measured. Calls in a row on one machine keep its runs/ and need no pack; a pack holds states
# of as many unfinished runs as fit, and names those that start anew. --whole starts no run that would not end in time:
# for the last call on a machine.
#
# Settings first, with h200_search.sh: they go into the rung's recipe, and its warm start is found by its recipe.
# Thirty minutes on one machine then:
#   benchmarks/h200_reproduce.sh main out - --seeds 0                          # a whole comparison of one seed first
#   benchmarks/h200_reproduce.sh main out                                      # the other seeds; what is done is kept
#   benchmarks/h200_reproduce.sh main out - --whole                            # what still ends in time, then the pack
#   benchmarks/h200_reproduce.sh ptq out-ptq                                   # takes over main's runs, trains the rest
# and on the next machine:
#   benchmarks/h200_reproduce.sh main out carried/pack
set -uo pipefail

[ $# -ge 2 ] || { sed -n '2,/^set/p' "$0" | grep '^#' | cut -c3-; exit 2; }
experiment=$1 out=$2 pack=${3:--}
shift $(($# < 3 ? $# : 3))
folder=runs/reproduce/$experiment
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"
tracefp4() { "${PYTHON:-python3}" -m tracefp4 "$@"; }

mkdir -p "$out" runs/reproduce
if [ -n "${STARTS:-}" ]; then
  tar -xzf "$STARTS" -C runs/reproduce || exit
fi
if [ "$pack" != - ] && [ ! -e "$folder/plan.json" ]; then
  tracefp4 reproduce unpack "$pack" "$folder" || exit
fi
"$(dirname "$0")/with_mps.sh" "${PYTHON:-python3}" -m tracefp4 reproduce "$experiment" --out "$folder" --max-minutes "${MINUTES:-8}" --jobs "${JOBS:-12}" "$@"
code=$?
[ $code -eq 0 ] || [ $code -eq 1 ] || [ $code -eq 4 ] || exit $code
tracefp4 reproduce status "$folder"
cp "$folder/results.md" "$folder/results.json" "$out/"
tracefp4 reproduce pack "$folder" "$out/pack" --mb "${MB:-50}" || exit
exit $code
