"""A Megatron checkout of our own: a tree's core, and a training package and a script of few lines."""

from pathlib import Path


def made_checkout(root: Path, megatron_tree: Path, script: str) -> Path:
    """``root``, filled; ``script`` is its ``pretrain_gpt.py``, which sets
    ``megatron.training.global_vars._GLOBAL_ARGS``."""
    (root / "megatron/training").mkdir(parents=True)
    (root / "megatron/core").symlink_to(megatron_tree / "megatron/core")
    (root / "megatron/training/__init__.py").touch()
    (root / "megatron/training/global_vars.py").write_text("_build_tokenizer = None\n")
    (root / "pretrain_gpt.py").write_text(script)
    return root
