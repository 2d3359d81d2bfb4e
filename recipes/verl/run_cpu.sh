#!/bin/sh
# GRPO on running sums through verl on the CPU. Usage: run_cpu.sh OUT [key=value ...]
#   recipes/verl/run_cpu.sh runs/verl-trace
#   recipes/verl/run_cpu.sh runs/verl-bf16 actor_rollout_ref.model.override_config.tracefp4.method=bf16
# PYTHON names the interpreter of an environment with recipes/verl/requirements.txt installed.
set -eu
[ $# -ge 1 ] || { sed -n '2,5p' "$0" >&2; exit 2; }
PYTHON=${PYTHON:-python}
SUMS_RECIPE=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
SUMS_OUT=$(cd "$1" && pwd)
shift
SUMS_DATA=$SUMS_OUT/data
[ -n "${SUMS_MODEL:-}" ] ||
  SUMS_MODEL=$("$PYTHON" -c 'from tracefp4.assets import builtin_model_path; print(builtin_model_path("sums-moe"))')
export SUMS_RECIPE SUMS_OUT SUMS_DATA SUMS_MODEL
[ -f "$SUMS_DATA/test.parquet" ] || "$PYTHON" "$SUMS_RECIPE/sums_data.py" "$SUMS_DATA"
if [ -s "$SUMS_OUT/metrics.jsonl" ]; then  # verl's file logger begins it anew, also where a run goes on
  n=1
  while [ -e "$SUMS_OUT/metrics-$n.jsonl" ]; do n=$((n + 1)); done
  mv "$SUMS_OUT/metrics.jsonl" "$SUMS_OUT/metrics-$n.jsonl"
fi
export PYTHONPATH="$SUMS_RECIPE${PYTHONPATH:+:$PYTHONPATH}"     # the agent loop of agents.yaml
export VERL_PLATFORM="${SUMS_PLATFORM:-cpu}"                    # the CPU platform of the plugin; run_gpu.sh: nvidia
# As an entry point the plugin's errors would only be logged.
export VERL_USE_EXTERNAL_MODULES="${VERL_USE_EXTERNAL_MODULES:-tracefp4.adapters.verl.plugin}"
export VERL_FILE_LOGGER_PATH="$SUMS_OUT/metrics.jsonl"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" RAY_USAGE_STATS_ENABLED=0 TOKENIZERS_PARALLELISM=false
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
exec "$PYTHON" -m verl.trainer.main_ppo --config-path "$SUMS_RECIPE" --config-name cpu hydra.run.dir="$SUMS_OUT" \
  hydra.output_subdir=null "$@"
