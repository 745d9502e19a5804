#!/usr/bin/env bash
# Runs one call of `python -m bench.gpu` from a bundle, on a machine with a GPU and without a network:
#   scripts/gpu_call.sh BUNDLE OUT CALL SECONDS [word ...]
# BUNDLE: the folder of scripts/gpu_bundle.sh.  OUT: where gpu.jsonl and log.txt are written; append gpu.jsonl to
# bench/results/gpu.jsonl afterwards.  CALL: a, b or c.  SECONDS: the deadline of the whole call, installation included.
# Further words go to bench.gpu. $PYTHON names the Python that has PyTorch; default: python3.
set -euo pipefail
unset CDPATH

if [ $# -lt 4 ] || [[ ! $3 =~ ^[abc]$ || ! $4 =~ ^[1-9][0-9]*$ ]]; then
    sed -n '2,6s/^# \{0,1\}//p' -- "${BASH_SOURCE[0]}"
    [[ ${1-} == -h || ${1-} == --help ]] || exit 2
    exit 0
fi
began=$SECONDS
for part in bench tests wheels stubs reference commit; do
    [ -e "$1/$part" ] || { echo "error: $1 has no $part; make it with scripts/gpu_bundle.sh" >&2; exit 2; }
done
bundle=$(cd -- "$1" && pwd)
out=$(mkdir -p -- "$2" && cd -- "$2" && pwd)
call=$3 seconds=$4
shift 4
python=$(command -v -- "${PYTHON:-python3}") || { echo "error: no ${PYTHON:-python3}; name a Python in PYTHON" >&2; exit 2; }
python=$(cd -- "$(dirname -- "$python")" && pwd)/$(basename -- "$python")
scratch=$(mktemp -d)
trap 'rm -rf -- "$scratch"' EXIT

! command -v nvidia-smi >/dev/null || nvidia-smi
"$python" -m pip install -q --no-index --no-deps --no-cache-dir --upgrade --target "$scratch/site" "$bundle"/wheels/*.whl
export PYTHONPATH=$scratch/site:$bundle/stubs${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
TITAN_COMMIT=$(cat -- "$bundle/commit")
export TITAN_COMMIT TORCHINDUCTOR_CACHE_DIR=$scratch/inductor TRITON_CACHE_DIR=$scratch/triton
export TORCHINDUCTOR_COMPILE_THREADS=4 # several jobs compile beside each other
cp -r -- "$bundle/reference" "$scratch/reference"
cd -- "$bundle"
# Only for PyTorch 2.11: that machine's is older than the range that titan is for.
TITAN_TORCH=$("$python" -c 'from importlib.metadata import version; print(version("torch").partition("+")[0])')
export TITAN_TORCH
"$python" -c 'import torch; print("torch", torch.__version__, "for CUDA", torch.version.cuda)'
echo "set up in $((SECONDS - began)) s"
"$python" -m bench.gpu --call "$call" --seconds "$((seconds - SECONDS + began))" --results "$out/gpu.jsonl" \
    --scratch "$scratch/runs" --reference "$scratch/reference" "$@" 2>&1 | tee "$out/table.txt"
