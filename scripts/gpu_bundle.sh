#!/usr/bin/env bash
# Collects what scripts/gpu_call.sh needs on a machine that has a GPU, PyTorch, pytest with xdist, tiktoken, tensorboard,
# safetensors and tokenizers, and no network:
#   scripts/gpu_bundle.sh [FOLDER [PYTHON_VERSION]]        default: gpu-bundle 3.12
# FOLDER then has wheels/ (titan-train, torchtitan, torchao and others; no PyTorch), stubs/ (a stand-in for `datasets`,
# which torchtitan imports and the benchmark does not use), bench/ (with the results that need not be measured again),
# tests/, commit (of this repository), and reference/ (the CPU's checkpoint and curves).
set -euo pipefail
unset CDPATH

case ${1-} in -*)
    sed -n '2,/^set/s/^# \{0,1\}//p' -- "${BASH_SOURCE[0]}"
    [[ $1 == -h || $1 == --help ]]
    exit
    ;;
esac
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
folder=${1:-gpu-bundle}
version=${2:-3.12}
most_mib=60

# It is emptied of what an earlier bundle had, so it must not be anything else.
if [ -e "$folder" ] && [ ! -f "$folder/commit" ] && [ -n "$(ls -A -- "$folder")" ]; then
    echo "error: $folder has other files than a bundle; name another folder" >&2
    exit 2
fi
mkdir -p -- "$folder/wheels" "$folder/stubs/datasets"
folder=$(cd -- "$folder" && pwd)
git -C "$root" describe --always --dirty >"$folder/commit"
python=$("$root/scripts/python.sh" float8)
pip=("$python" -m pip)
"$python" -m pip --version >/dev/null 2>&1 || pip=(python3 -m pip)

rm -f -- "$folder"/wheels/*.whl
rm -rf -- "$root"/build/lib # setuptools would pack what has moved away too
"${pip[@]}" wheel -q --no-deps --wheel-dir "$folder/wheels" "$root"
platforms=()
for glibc in manylinux_2_28 manylinux_2_24 manylinux_2_17 manylinux2014; do
    platforms+=(--platform "${glibc}_x86_64")
done
"${pip[@]}" download -q --no-deps --only-binary=:all: --python-version "$version" "${platforms[@]}" \
    --dest "$folder/wheels" \
    "torchtitan==0.2.2" "torchdata>=0.11" "torchao>=0.18,<0.19" tomli_w tomlkit tqdm tyro docstring-parser typeguard einops

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
(cd -- "$root" && "$python" -m bench.gpu --rehearse --reference-only --reference "$folder/reference" --scratch "$folder/reference" \
    --results "$folder/reference/gpu.jsonl")

mib=$(du -sm -- "$folder" | cut -f1)
echo "$folder: $mib MiB"
[ "$mib" -le "$most_mib" ] || { echo "error: the bundle has $mib MiB; at most $most_mib MiB travel" >&2; exit 1; }
