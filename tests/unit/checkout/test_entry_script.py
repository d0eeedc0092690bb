"""A script of one's own is looked at: do hooks in megatron/ reach what it trains?"""

import pytest

from megatron_ext.checkout.entry_script import look_at
from megatron_ext.formats.errors import InputError


@pytest.mark.parametrize(
    "text",
    [
        "from megatron.training import get_args, pretrain\n",
        "def main():\n    from megatron.training.training import pretrain\n    pretrain()\n",
    ],
)
def test_a_script_that_trains_by_megatrons_pretrain_needs_no_line(tmp_path, text):
    (tmp_path / "own.py").write_text(text)
    assert "it needs no hooks itself" in look_at(tmp_path, tmp_path / "own.py")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("from fork.training import pretrain\n", "it takes pretrain from fork.training; insert the calls by hand"),
        ("import torch\n", "it does not import pretrain"),
        ("def (\n", "cannot be read as Python"),
    ],
)
def test_a_script_that_no_hook_reaches_is_refused(tmp_path, text, said):
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(InputError, match=f"own.py: --entry: .*{said}"):
        look_at(tmp_path, tmp_path / "own.py")
