#!/usr/bin/env bash
# Prints the Python that runs titan with the extras named, and sets up .venv first where nobody has one.
#   scripts/python.sh [extra ...]
# In order: $TITAN_PYTHON; the python3 at hand (an active environment), when it has titan; .venv.
# .venv gets the versions of constraints.txt, on which the tests were run. TITAN_TORCH=2.15.0 asks for another PyTorch,
# of the range of pyproject.toml: a Python at hand must have it, and the environment is .venv-2.15.0.
# Set up again only when pyproject.toml, constraints.txt or the place of the repository has changed, or an extra is new.
# Never set up by many processes at once: tasks of srun and nodes of a run share the folder, on file systems that may
# not lock.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
# An active .venv-VERSION says what TITAN_TORCH does.
case ${VIRTUAL_ENV:-} in "$root"/.venv-*) TITAN_TORCH=${TITAN_TORCH:-${VIRTUAL_ENV#"$root"/.venv-}} ;; esac
TITAN_TORCH=${TITAN_TORCH:-}
venv=$root/.venv${TITAN_TORCH:+-$TITAN_TORCH}
stamp=$venv/titan.stamp
extras=("$@")

fail() {
    echo "error: $*" >&2
    exit 2
}

# Whether a Python has titan, pytest where the extra dev is asked for, and the PyTorch of TITAN_TORCH. Safe path: not the
# titan that lies in the working directory.
has_titan() {
    local modules=(titan.plugins titan.planner titan.inference titan.testing titan.configs tomlkit)
    [[ " ${extras[*]-} " != *" dev "* ]] || modules+=(pytest xdist ruff mypy)
    PYTHONSAFEPATH=1 "$1" - "$TITAN_TORCH" "${modules[@]}" 2>/dev/null <<'END'
import sys
from importlib.metadata import version
from importlib.util import find_spec
asked, *modules = sys.argv[1:]
specs = map(find_spec, modules)
if sys.version_info < (3, 11) or not all(spec and spec.origin for spec in specs):
    sys.exit(1)
sys.exit(asked not in ("", version("torch").partition("+")[0]))
END
}

# Folders that have moved away leave compiled files, and Python takes such a folder for the package of its name.
remove_leftovers() {
    local folder
    for folder in "$root"/titan/planner "$root"/titan/inference "$root"/titan/testing; do
        [ -d "$folder" ] || continue
        rm -rf -- "$folder"/__pycache__ "$folder"/*/__pycache__ 2>/dev/null || true
        rmdir -- "$folder"/*/ "$folder" 2>/dev/null || true
    done
}

python_to_build_on() {
    local name found=""
    for name in python3 python3.13 python3.12 python3.11 python; do
        if "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
            command -v "$name"
            return
        fi
        [ -n "$found" ] || found=$("$name" -c 'import sys; print(sys.version.split()[0], "at", sys.executable)' 2>/dev/null || true)
    done
    fail "titan needs Python 3.11 to 3.13; found ${found:-none}"
}

# Whether TITAN_TORCH is in the range of pyproject.toml, ">=OLDEST,<AFTER".
check_range() {
    local range oldest after
    range=$(sed -n 's/^ *"torch\([<>].*\)",$/\1/p' -- "$root/pyproject.toml")
    after=${range#*<} oldest=${range%,*}
    [ "$(printf '%s\n' "${oldest#>=}" "$TITAN_TORCH" "$after" | sort -V | sed -n 2p)" = "$TITAN_TORCH" ] && [ "$TITAN_TORCH" != "$after" ] ||
        fail "TITAN_TORCH=$TITAN_TORCH: titan needs PyTorch $range; choose one of these, or unset TITAN_TORCH for that of constraints.txt"
}

fingerprint() { (cat -- "$root/pyproject.toml" "$root/constraints.txt" && echo "$root") | cksum | tr ' ' '-'; }

# The stamp holds the fingerprint and the extras installed; it is written last, so a broken setup is done again.
is_set_up() {
    [ -x "$venv/bin/python" ] && [ -f "$stamp" ] || return 1
    local installed extra
    installed=" $(cat -- "$stamp") "
    [[ $installed == " $(fingerprint) "* ]] || return 1
    for extra in ${extras[@]+"${extras[@]}"}; do
        [[ $installed == *" $extra "* ]] || return 1
    done
}

# How many processes of one job may call this at once; those of one machine wait for each other.
processes() {
    local count most=1
    for count in "${SLURM_STEP_NUM_TASKS:-1}" "${NNODES:-1}" "${PET_NNODES:-1}"; do
        [[ ! $count =~ ^[0-9]+$ ]] || ((count <= most)) || most=$count
    done
    echo "$most"
}

refuse_to_set_up() {
    local what="$venv is not set up${extras[*]:+ with ${extras[*]}}" choice="or name a Python that has titan in TITAN_PYTHON"
    [ -w "$root" ] || fail "$what, and $root is read-only; set it up where it can be written, $choice"
    [ "$(processes)" -eq 1 ] ||
        fail "$what, and $(processes) processes of this job start at once; run scripts/python.sh once before the job, $choice"
}

wait_for_others() {
    local code=0
    flock -n 9 || code=$?
    [ "$code" -eq 1 ] || return 0 # it is ours, or this file system cannot lock
    echo "waiting for another process that sets up an environment in $root" >&2 || true
    flock 9 || true
}

set_up() {
    local base pip all constraints=$root/constraints.txt
    base=$(python_to_build_on)
    echo "setting up $(basename -- "$venv") (once, about a minute)" >&2
    [ ! -f "$stamp" ] || extras+=($(cut -d' ' -f2- -- "$stamp"))
    rm -f -- "$stamp"
    # Some systems ship Python without ensurepip; their own pip can install into another environment.
    [ -x "$venv/bin/python" ] || "$base" -m venv -- "$venv" >/dev/null 2>&1 || "$base" -m venv --clear --without-pip -- "$venv"
    pip=("$venv/bin/python" -m pip)
    "${pip[@]}" --version >/dev/null 2>&1 || pip=("$base" -m pip --python "$venv/bin/python")
    if [ -n "$TITAN_TORCH" ]; then
        constraints=$venv/constraints.txt
        sed "s/^torch==.*/torch==$TITAN_TORCH/" -- "$root/constraints.txt" >"$constraints"
    fi
    all=$(printf '%s\n' ${extras[@]+"${extras[@]}"} | sort -u | paste -sd, -)
    "${pip[@]}" install -qq --disable-pip-version-check --constraint "$constraints" --editable "$root${all:+[$all]}" >&2 ||
        fail "setting up $(basename -- "$venv") failed; what pip said is above. Run the command again to go on${TITAN_TORCH:+, if there is a PyTorch $TITAN_TORCH}"
    echo "$(fingerprint) ${all//,/ }" >"$stamp"
}

remove_leftovers
[[ $TITAN_TORCH =~ ^([1-9][0-9]*\.[1-9][0-9]*\.(0|[1-9][0-9]*))?$ ]] ||
    fail "TITAN_TORCH=$TITAN_TORCH: write a version of PyTorch, such as 2.15.0"
if [ -n "${TITAN_PYTHON:-}" ]; then
    command -v -- "$TITAN_PYTHON" >/dev/null || fail "TITAN_PYTHON=$TITAN_PYTHON: there is no such program"
    if ! has_titan "$TITAN_PYTHON"; then
        [ -z "$TITAN_TORCH" ] || check_range
        fail "TITAN_PYTHON=$TITAN_PYTHON has no titan${extras[*]:+ with ${extras[*]}}${TITAN_TORCH:+ on PyTorch $TITAN_TORCH}; run:" \
            "$TITAN_PYTHON -m pip install -e '$root${extras[*]:+[$(IFS=,; echo "${extras[*]}")]}'${TITAN_TORCH:+ torch==$TITAN_TORCH}"
    fi
    echo "$TITAN_PYTHON"
elif [ ! "${VIRTUAL_ENV:-}" -ef "$venv" ] && has_titan python3; then
    command -v python3
else
    [ -z "$TITAN_TORCH" ] || check_range
    if ! is_set_up; then
        refuse_to_set_up
        # One at a time: a second first call waits here and then finds all done. Not every file system can lock.
        exec 9<"$root"
        ! command -v flock >/dev/null || wait_for_others
        is_set_up || set_up
    fi
    echo "$venv/bin/python"
fi
