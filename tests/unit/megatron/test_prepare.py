"""What preparing a scheduled run does to the process. Needs no process group."""

import pytest

from megatron_ext.megatron import prepare


@pytest.mark.parametrize(("cuda", "calls"), [(True, 0), (False, 1)])
def test_the_heap_of_a_gpu_user_is_left_alone(monkeypatch, cuda, calls):
    kept = []
    monkeypatch.setattr(prepare, "has_cuda", lambda: cuda)
    monkeypatch.setattr(prepare, "keep_freed_blocks", lambda: kept.append(True))
    prepare.keep_host_blocks()
    assert len(kept) == calls
