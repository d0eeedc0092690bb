"""``python -m megatron_ext.checkout.private_tree RELEASE DIRECTORY``: a private, patched core tree.

Used by scripts/setup.sh: the megatron-core release is unpacked beside the project, so that no
installed package is ever edited.
"""

import sys
from pathlib import Path

from megatron_ext.checkout import apply, obtain, verify_hooks
from megatron_ext.formats.errors import InputError


def prepare(release: str, directory) -> Path:
    """Unpack and patch ``release`` under ``directory``; does nothing where that is done.

    Raises:
        InputError: the release is not served, cannot be had, or a hook is not in its place.
    """
    if not (Path(directory) / "megatron").is_dir():
        print(f"unpacking megatron-core {release} into {directory}", file=sys.stderr)
    tree = obtain(release, directory)
    apply(tree)
    problems = verify_hooks(tree)
    if problems:
        raise InputError(f"{len(problems)} hooks are not in their place: {problems[0]}", file=tree)
    return tree


def main() -> int:
    if len(sys.argv) != 3:
        print("usage: python -m megatron_ext.checkout.private_tree RELEASE DIRECTORY", file=sys.stderr)
        return 2
    try:
        prepare(sys.argv[1], sys.argv[2])
    except InputError as error:
        print(f"megatron-ext: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
