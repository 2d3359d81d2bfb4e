#!/bin/sh
# The run of run_cpu.sh with FSDP2 ranks and replicas on this machine's GPUs. Usage: run_gpu.sh OUT [key=value ...]
#   recipes/verl/run_gpu.sh runs/verl-trace
#   recipes/verl/run_gpu.sh runs/verl-trace trainer.n_gpus_per_node=2 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8
# The policy is that of benchmarks/larger_policy.py, since the kernels of the rollout do not take the built-in one's widths;
# it is made in OUT/policy, or in SUMS_MODEL where that is set.
set -eu
[ $# -ge 1 ] || { sed -n '2,6p' "$0" >&2; exit 2; }
HERE=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
SUMS_MODEL=${SUMS_MODEL:-$(cd "$1" && pwd)/policy}
[ -f "$SUMS_MODEL/config.json" ] || "${PYTHON:-python}" "$HERE/../../benchmarks/larger_policy.py" "$SUMS_MODEL"
export SUMS_MODEL SUMS_PLATFORM=nvidia
OUT=$1
shift
exec "$HERE/run_cpu.sh" "$OUT" trainer.device=cuda "$@"
