#!/usr/bin/env bash
# Runs one call of `python -m bench.gpu` from a bundle, on a machine with a GPU and without a network:
#   scripts/gpu_call.sh BUNDLE OUT CALL SECONDS [word ...]
# BUNDLE: the folder of scripts/gpu_bundle.sh.  OUT: where gpu.jsonl and log.txt are written; append gpu.jsonl to
# bench/results/gpu.jsonl afterwards.  CALL: a, b or c.  SECONDS: the deadline of the whole call, installation included.
# Further words go to bench.gpu. $PYTHON names the Python that has PyTorch; default: python3.
set -euo pipefail

began=$SECONDS
bundle=$(cd -- "$1" && pwd)
out=$(mkdir -p -- "$2" && cd -- "$2" && pwd)
call=$3 seconds=$4
shift 4
python=${PYTHON:-python3}
scratch=$(mktemp -d)

nvidia-smi || true
"$python" -m pip install -q --no-index --no-deps --no-cache-dir --upgrade --target "$scratch/site" "$bundle"/wheels/*.whl
export PYTHONPATH=$scratch/site:$bundle/stubs${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export TITAN_COMMIT=$(cat -- "$bundle/commit")
export TORCHINDUCTOR_CACHE_DIR=$scratch/inductor TRITON_CACHE_DIR=$scratch/triton TORCHINDUCTOR_COMPILE_THREADS=4
cp -r -- "$bundle/reference" "$scratch/reference"
cd -- "$bundle"
"$python" -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__)'
echo "set up in $((SECONDS - began)) s"
"$python" -m bench.gpu --call "$call" --seconds "$((seconds - SECONDS + began))" --results "$out/gpu.jsonl" \
    --scratch "$scratch/runs" --reference "$scratch/reference" "$@" 2>&1 | tee "$out/table.txt"
