"""A Megatron checkout of our own: a tree's core, and a training package and a script of few lines."""

from pathlib import Path


def made_checkout(root: Path, megatron_tree: Path, script: str) -> Path:
    """``root``, filled; ``script`` is its ``pretrain_gpt.py``, which sets ``megatron.training.ARGS``."""
    (root / "megatron/training").mkdir(parents=True)
    (root / "megatron/core").symlink_to(megatron_tree / "megatron/core")
    (root / "megatron/training/__init__.py").write_text("def get_args():\n    return ARGS\n")
    (root / "pretrain_gpt.py").write_text(script)
    return root
