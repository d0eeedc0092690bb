#!/usr/bin/env bash
# Set up .venv from pinned versions and a patched Megatron; does only what is not done yet.
#
#   PYTHON=python3.11         interpreter to use, 3.10 or newer
#   MEGATRON_PATH=DIR         patch this checkout instead of the megatron-core release
#   WITH_CHECKOUT=1           also install what megatron/training of a checkout imports
#   WITH_TESTS=1              also install what scripts/test.sh runs
#   MEGATRON_CORE=0.16.1      release to unpack into .megatron (site-packages is never edited)
#
# On a machine whose PyTorch already sees a CUDA device, that PyTorch is used.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '\033[1m==> %s\033[0m\n' "$*" >&2; }
die() { printf 'setup: %s\n' "$*" >&2; exit 2; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.11 python3.12 python3 python3.10 python3.13; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python 3.10 or newer found${PYTHON:+ (PYTHON = $PYTHON)}"
}

release=${MEGATRON_CORE:-$(sed -n 's/^megatron-core==//p' constraints.txt)}
python=$(find_python)

# What is asked for beyond training the example; what an earlier call installed stays.
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
    if "$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
        say "using the installed PyTorch, which sees a CUDA device"
        venv_options+=(--system-site-packages)
        base=core
    fi
    if [ ! -x .venv/bin/python ] || ! .venv/bin/python -c '' 2>/dev/null; then
        say "making .venv with $("$python" --version)"
        "$python" -m venv "${venv_options[@]}" .venv
    fi
    if [ ${#venv_options[@]} -gt 0 ] && ! .venv/bin/python -c 'import torch' 2>/dev/null; then
        # An interpreter that is a venv itself hands on the packages of its base alone.
        "$python" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' \
            > "$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/megatron_ext_torch.pth"
    fi
    say "installing pinned versions (constraints.txt)"
    PIP_DISABLE_PIP_VERSION_CHECK=1 .venv/bin/python -m pip install --quiet --progress-bar on -c constraints.txt -e ".[$base$extras]"
    printf '%s %s\n' "$pins" "$base$extras" > .venv/.megatron_ext_stamp
fi

if [ -n "${MEGATRON_PATH:-}" ]; then
    [ -d "$MEGATRON_PATH" ] || die "MEGATRON_PATH = '$MEGATRON_PATH': no such directory"
    .venv/bin/megatron-ext patch apply "$MEGATRON_PATH" >&2
else
    .venv/bin/python -m megatron_ext.checkout.private_tree "$release" .megatron >&2
    # Behind everything else on the path, so that a checkout on PYTHONPATH comes first.
    printf '%s\n' "$PWD/.megatron" > "$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/megatron_ext_core.pth"
fi
