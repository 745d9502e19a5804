#!/usr/bin/env bash
# Collects what `python -m bench.gpu` and `pytest -m gpu` need on a machine without a network that has PyTorch, pytest,
# tiktoken, tensorboard and safetensors:
#   scripts/gpu_bundle.sh [FOLDER [PYTHON_VERSION]]        default: gpu-bundle 3.12
# FOLDER then has wheels/ (titan-train, torchtitan, torchao and others; no PyTorch), stubs/ (a stand-in for `datasets`,
# which torchtitan imports and the benchmark does not use), bench/, tests/, and reference/ (the CPU's checkpoint and
# curves). There:
#   cd FOLDER && python -m pip install --no-index --no-deps wheels/*.whl && export PYTHONPATH=$PWD/stubs
#   python -m bench.gpu --part 1 --reference reference --output results      and so on with parts 2 to 4
#   python -m pytest -m gpu tests/dist/test_gpu.py tests/unit/test_float8.py
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
folder=${1:-gpu-bundle}
version=${2:-3.12}
most_mib=60

mkdir -p -- "$folder/wheels" "$folder/stubs/datasets"
folder=$(cd -- "$folder" && pwd)
python=$("$root/scripts/python.sh" float8)
pip=("$python" -m pip)
"$python" -m pip --version >/dev/null 2>&1 || pip=(python3 -m pip)

"${pip[@]}" wheel -q --no-deps --wheel-dir "$folder/wheels" "$root"
platforms=()
for glibc in manylinux_2_28 manylinux_2_24 manylinux_2_17 manylinux2014; do
    platforms+=(--platform "${glibc}_x86_64")
done
"${pip[@]}" download -q --no-deps --only-binary=:all: --python-version "$version" "${platforms[@]}" \
    --dest "$folder/wheels" \
    "torchtitan==0.2.2" "torchdata>=0.11" "torchao>=0.18,<0.19" tomli_w tqdm tyro docstring-parser typeguard einops tokenizers

cat >"$folder/stubs/datasets/__init__.py" <<'END'
"""Stands in for the package of this name: importable, with nothing to load."""

Dataset = load_dataset = None
END
cat >"$folder/stubs/datasets/distributed.py" <<'END'
"""Stands in for the module of this name."""

split_dataset_by_node = None
END

for name in bench tests; do
    rm -rf -- "${folder:?}/$name"
    cp -r -- "$root/$name" "$folder/$name"
done
find "$folder/bench" "$folder/tests" -name __pycache__ -prune -exec rm -rf -- {} +
(cd -- "$root" && "$python" -m bench.gpu --reference-only --reference "$folder/reference" --output "$folder/reference")

mib=$(du -sm -- "$folder" | cut -f1)
echo "$folder: $mib MiB"
[ "$mib" -le "$most_mib" ] || { echo "error: the bundle has $mib MiB; at most $most_mib MiB travel" >&2; exit 1; }
