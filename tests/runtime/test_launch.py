"""What ranks find in their environment."""

import sys

import pytest

from megatron_ext.runtime.launch import launch

SAY = "import os, sys; open(sys.argv[1], 'w').write(os.environ['MALLOC_ARENA_MAX'])"


@pytest.mark.parametrize(("given", "found"), [(None, "1"), ("7", "7")])
def test_one_arena_unless_the_user_says_otherwise(monkeypatch, tmp_path, given, found):
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    if given is not None:
        monkeypatch.setenv("MALLOC_ARENA_MAX", given)
    assert launch([sys.executable, "-c", SAY, str(tmp_path / "said")], 1) == 0
    assert (tmp_path / "said").read_text() == found
