#!/usr/bin/env bash
# The main job: ./run_train.sh [--config FILE] [--table.key VALUE ...]; --help says more.
# Sets up what is missing first (scripts/python.sh), then starts the ranks of this node (titan/launch.py).
set -euo pipefail

# A signal that comes before titan listens waits until it does; it would end this script, or Python while it starts.
block=(env --block-signal=TERM,USR1) # coreutils 8.31 or newer
if [ -z "${TITAN_BLOCKED:-}" ] && "${block[@]}" true 2>/dev/null; then
    TITAN_BLOCKED=1 exec "${block[@]}" "$BASH" "$0" "$@"
fi
unset TITAN_BLOCKED

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
# sbatch runs a copy of this file from another folder.
[ -e "$root/scripts/python.sh" ] || root=${SLURM_SUBMIT_DIR:-$PWD}

python=$("$root/scripts/python.sh")
# -P: nothing that lies in the working directory stands in for an installed package.
exec "$python" -P -m titan.launch "$@"
