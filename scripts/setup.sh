#!/usr/bin/env bash
# Set up .venv with pinned versions and a patched Megatron. Does only what is not done yet.
#
#   PYTHON=python3.11         interpreter to use, 3.10 or newer; default: one whose PyTorch sees a CUDA device, else the first
#   WHEELS=DIR                install from the wheels in DIR, without a network. To fill DIR on another machine, run with
#                             the same Python, in this directory:
#                               pip download -d DIR -c constraints.txt ".[core]" setuptools pip "cuda-bindings==13.*"
#                               pip download -d DIR --no-deps megatron-core==RELEASE    # that of constraints.txt
#                             Use ".[train]" if there is no PyTorch, ".[core,test]" for WITH_TESTS, 12.* for CUDA 12,
#                             and beside numpy 1 also ortools==9.14.6206 in a call without -c
#   MEGATRON_PATH=DIR         patch this checkout instead of the megatron-core release
#   WITH_CHECKOUT=1           also install the packages that megatron/training of a checkout imports
#   WITH_TESTS=1              also install the packages that scripts/test.sh needs
#   MEGATRON_CORE=0.16.1      release to unpack into .megatron (site-packages is never edited); default: the newest that
#                             is supported and has a package for the interpreter, see constraints.txt
#
# If the machine's PyTorch already sees a CUDA device, that PyTorch and its numpy are used in the installed versions.
# USE_SYSTEM_TORCH=1 uses them without a device as well.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '\033[1m==> %s\033[0m\n' "$*" >&2; }
die() { printf 'setup: %s\n' "$*" >&2; exit 2; }

# GPU images pin what pip may install (PIP_CONSTRAINT). These pins are for their environment and conflict with ours.
unset PIP_CONSTRAINT PIP_BUILD_CONSTRAINT
# Sites tell pip to install elsewhere (PIP_USER, or ``user`` in its configuration). Packages go into .venv only.
unset PIP_TARGET PIP_PREFIX PIP_ROOT
export PIP_USER=0
if [ -n "${WHEELS:-}" ]; then
    [ -d "$WHEELS" ] || die "WHEELS = '$WHEELS': no such directory"
    # As a URL, because pip splits this variable at spaces.
    export PIP_NO_INDEX=1 PIP_FIND_LINKS="file://$(realpath "$WHEELS" | sed 's/%/%25/g; s/ /%20/g; s/#/%23/g; s/?/%3F/g')"
fi

has_torch() { # has_torch PYTHON: whether its PyTorch is to be used
    "$1" -c 'import os, sys, torch; sys.exit(not (torch.cuda.is_available() or os.environ.get("USE_SYSTEM_TORCH")))' 2> /dev/null
}

find_python() {
    local candidate candidates=(python3.11 python3.12 python3 python3.10 python3.13)
    if [ -n "${PYTHON:-}" ]; then
        candidates=("$PYTHON") # no other, which may have another PyTorch or none
    else # prefer an image's python3 to a newer one that has no PyTorch
        for candidate in python3 python; do
            if has_torch "$candidate" && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
                command -v "$candidate"
                return
            fi
        done
    fi
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python 3.10 or newer found${PYTHON:+ (PYTHON = $PYTHON)}"
}

python=$(find_python)
than=$("$python" -c 'import sys; print("<" if sys.version_info < (3, 12) else ">=")')
release=${MEGATRON_CORE:-$(sed -n "s/^megatron-core==\([^;]*\); python_version $than .*/\1/p" constraints.txt)}

# Packages in addition to those that train the example. Packages that an earlier call installed stay.
extras=""
[ -z "${MEGATRON_PATH:-}${WITH_CHECKOUT:-}" ] || extras+=",checkout"
[ -z "${WITH_TESTS:-}" ] || extras+=",test"
pins=$(cat pyproject.toml setup.py constraints.txt | sha256sum | cut -d' ' -f1)
read -r installed_pins installed_extras 2>/dev/null < .venv/.megatron_ext_stamp || installed_pins="" installed_extras=""
missing=""
for extra in ${extras//,/ }; do
    [[ ",$installed_extras," == *",$extra,"* ]] || missing+=" $extra"
done
if [ "$installed_pins" != "$pins" ] || [ -n "$missing" ]; then
    for extra in ${installed_extras//,/ }; do
        [[ ",$extras," == *",$extra,"* || $extra == train || $extra == core ]] || extras+=",$extra"
    done
    base=train
    venv_options=()
    constraints=constraints.txt
    if has_torch "$python"; then
        say "using the installed PyTorch"
        venv_options+=(--system-site-packages)
        base=core
        # The image's torch and numpy belong together, so both stay as they are.
        constraints=.venv/constraints.txt
    fi
    pip=(.venv/bin/python -m pip)
    if [ ! -x .venv/bin/python ] || ! .venv/bin/python -c '' 2>/dev/null; then
        say "making .venv with $("$python" --version)"
        if ! "$python" -m venv "${venv_options[@]}" .venv > /dev/null 2>&1; then # Debian's Python has no ensurepip
            rm -rf .venv
            "$python" -m venv --without-pip "${venv_options[@]}" .venv || die "$python cannot make .venv: install python3-venv"
        fi
    fi
    if ! .venv/bin/python -m pip --version > /dev/null 2>&1; then
        pip=("$python" -m pip --python .venv/bin/python)
        "${pip[@]}" --version > /dev/null 2>&1 || die "$python has no pip (22.3 or newer): install python3-venv"
        "${pip[@]}" install --quiet pip # needed to fetch Megatron's package
        pip=(.venv/bin/python -m pip)
    fi
    if [ "$constraints" != constraints.txt ]; then
        grep -vE '^(torch|numpy)==' constraints.txt > "$constraints"
        numpy=$("$python" -c 'import numpy; print(numpy.__version__)' 2> /dev/null) || numpy=""
        [ -z "$numpy" ] || printf 'numpy==%s\n' "$numpy" >> "$constraints" # another would hide it
        # The last ortools that runs with numpy 1, which some images have.
        [[ $numpy != 1.* ]] || sed -i 's/^ortools==.*/ortools==9.14.6206/' "$constraints"
    fi
    # From an interpreter in a venv, a new venv gets only the packages of that interpreter's base: no PyTorch, or another.
    place='import importlib.util, pathlib; print(pathlib.Path(importlib.util.find_spec("torch").origin).parents[1])'
    if [ ${#venv_options[@]} -gt 0 ] && [ "$(.venv/bin/python -c "$place" 2> /dev/null)" != "$("$python" -c "$place")" ]; then
        "$python" -c "$place" \
            > "$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/megatron_ext_torch.pth"
    fi
    say "installing pinned versions (constraints.txt)"
    PIP_DISABLE_PIP_VERSION_CHECK=1 "${pip[@]}" install --quiet --progress-bar on -c "$constraints" -e ".[$base$extras]"
    printf '%s %s\n' "$pins" "$base$extras" > .venv/.megatron_ext_stamp
fi

# Streams wait for flags with cuda-bindings. PyTorch for CUDA 13 brings it. Without it, copies between host and device are
# refused, so each call tries again what an earlier one could not install. The version is read from a file of PyTorch,
# because importing PyTorch takes seconds.
if ! .venv/bin/python -c 'import cuda.bindings' 2> /dev/null; then
    cuda=$(.venv/bin/python -c 'import importlib.util as found, runpy
place = found.find_spec("torch").origin.replace("__init__.py", "version.py")
print((runpy.run_path(place)["cuda"] or "").split(".")[0])')
    if [ -n "$cuda" ]; then
        say "installing cuda-bindings for CUDA $cuda"
        PIP_DISABLE_PIP_VERSION_CHECK=1 .venv/bin/python -m pip install --quiet --retries 0 --timeout 5 "cuda-bindings==$cuda.*" \
            || say "cuda-bindings could not be installed: schedules that copy between host and device will be refused"
    fi
fi

said=$(.venv/bin/python -W ignore scripts/why_no_device.py) || said=""
[ -z "$said" ] || say "$said"

if [ -n "${MEGATRON_PATH:-}" ]; then
    [ -d "$MEGATRON_PATH" ] || die "MEGATRON_PATH = '$MEGATRON_PATH': no such directory"
    .venv/bin/megatron-ext patch apply "$MEGATRON_PATH" >&2
else
    .venv/bin/python scripts/core_tree.py "$release" .megatron >&2
    # Last on the path, so that a checkout on PYTHONPATH comes first.
    printf '%s\n' "$PWD/.megatron" > "$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/megatron_ext_core.pth"
fi
