#!/usr/bin/env bash
# Runs a command under NVIDIA's Multi-Process Service, so that processes that share a GPU use it at the same time instead
# of in turns:
#
#   benchmarks/with_mps.sh tracefp4 reproduce main --jobs 12
#
# The service is this command's own, with sockets in a folder of its own, and ends with it; no setting of the GPU changes.
# Where it is not installed or does not take a client, says so and runs the command without. Within another with_mps.sh the
# outer service is used. Exit code: the command's.
set -uo pipefail

[ $# -ge 1 ] || { sed -n '2,/^set/p' "$0" | grep '^#' | cut -c3-; exit 2; }
if [ -n "${CUDA_MPS_PIPE_DIRECTORY:-}" ]; then  # two services would take turns on a GPU again
  exec "$@"
fi
control=$(command -v nvidia-cuda-mps-control || ls /usr/local/nvidia/bin/nvidia-cuda-mps-control 2>/dev/null)
if [ -z "$control" ]; then
  echo "with_mps: nvidia-cuda-mps-control is not installed; runs without" >&2
  exec "$@"
fi
folder=$(mktemp -d)
export CUDA_MPS_PIPE_DIRECTORY=$folder/pipe CUDA_MPS_LOG_DIRECTORY=$folder/log
mkdir "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
stop() { echo quit | "$control" >/dev/null 2>&1; rm -rf "$folder"; }
trap stop EXIT

if "$control" -d && timeout 60 "${PYTHON:-python3}" -c 'import torch; torch.ones(1, device="cuda").item()'; then
  "$@" &
else
  echo "with_mps: the service took no client: $(tail -n 1 "$CUDA_MPS_LOG_DIRECTORY"/*.log 2>/dev/null); runs without" >&2
  stop
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
  "$@" &
fi
child=$!
trap 'interrupted=1; kill -TERM $child 2>/dev/null' TERM INT  # the command ends first, its state saved
interrupted=1
while [ $interrupted = 1 ]; do  # a signal ends wait, and not yet the command
  interrupted=0
  wait $child
  code=$?
done
exit $code
