#!/usr/bin/env bash
# Patch, train and revert releases of Megatron-LM. Prints one table.
#
#   scripts/test_checkouts.sh MIRROR [TAG...]   from a git clone or mirror with its tags
#   scripts/test_checkouts.sh pypi [VERSION...] the core of releases from the package index:
#                                               patched, verified and reverted, not trained
#
#   scripts/test_checkouts.sh MIRROR --commits N --seed S --at COMMIT... --forks CLONE...
#                                               patched, verified and reverted, not trained: all releases, N drawn commits
#                                               of main, the commits named, every head of the clones named
#
# --no-train leaves out training; --layouts adds 1F1B, no pipeline, tensor parallelism and
# zero stage 3. PYTHON names an interpreter that has torch; without it .venv is set up and used.
# edited_checkouts.py does the same with trees that were edited at random.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case " $* " in *" --commits "* | *" --forks "* | *" --at "*) trains= ;; *) trains=1 ;; esac
if [ -z "${PYTHON:-}" ] && [ -n "$trains" ] && [ -d "${1:-}" ]; then
    env -u MEGATRON_PATH WITH_CHECKOUT=1 "$here/scripts/setup.sh"
fi
python=${PYTHON:-$here/.venv/bin/python}
[ -x "$python" ] || python=python3
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}
exec "$python" "$here/scripts/test_checkouts.py" "$@"
