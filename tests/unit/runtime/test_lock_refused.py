"""Too little memory that may be locked is one line with the bytes and the limit."""

import resource

import pytest

from megatron_ext.runtime import lock_refused


@pytest.mark.parametrize(
    ("limit", "said"),
    [(8 << 20, "the limit is 8388608 bytes: ulimit -l unlimited"), (resource.RLIM_INFINITY, "sets no limit")],
)
def test_bytes_reason_and_limit_are_named(monkeypatch, limit, said):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    line = lock_refused.said(1 << 30, "cudaHostRegister: error 2")
    assert line.startswith("1073741824 bytes") and "error 2" in line and said in line and "\n" not in line
