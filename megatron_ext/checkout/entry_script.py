"""A user's own training script: check that it trains through the hooks in ``megatron/``."""

import ast
from pathlib import Path

from megatron_ext.formats.errors import InputError


def look_at(tree: Path, script: Path) -> str:
    """One line for the user about a script that needs no hook of its own.

    Args:
        tree: root of the Megatron tree.

    Raises:
        InputError: the script does not parse, or does not train with ``pretrain`` of ``megatron.training``.
    """
    try:
        found = ast.parse(script.read_bytes())  # bytes: read in the encoding that the script declares, not the locale's
    except (OSError, SyntaxError, ValueError) as error:
        raise InputError(f"cannot be read as Python: {error}", file=script, field="--entry") from None
    imports = (node for node in ast.walk(found) if isinstance(node, ast.ImportFrom))
    sources = {node.module or "." for node in imports if any(alias.name == "pretrain" for alias in node.names)}
    if any(source.startswith("megatron.training") for source in sources):
        return (
            f"{script}: trains with pretrain of {tree}/megatron/training, where the hooks are; it needs no hooks itself"
        )
    other = f"it takes pretrain from {', '.join(sorted(sources))}" if sources else "it does not import pretrain"
    why = f"does not train with pretrain of megatron.training, where the hooks are: {other}"
    raise InputError(f"{why}; insert the calls by hand as patches/README.md says", file=script, field="--entry")
