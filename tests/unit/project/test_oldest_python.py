"""What a newer Python accepts and Python 3.10 refuses when it imports a module."""

import ast

from places import ROOT


def test_no_named_tuple_has_a_second_base():
    """Python 3.10 refuses it, also ``Generic``."""
    for path in sorted((ROOT / "megatron_ext").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            bases = [ast.unparse(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []
            assert "NamedTuple" not in bases or len(bases) == 1, f"{path}: {bases}"
