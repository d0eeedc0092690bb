"""Too little memory that may be locked is one line with the bytes and the limit."""

import resource

import pytest

from megatron_ext.formats.errors import InputError
from megatron_ext.measure import fabric
from megatron_ext.runtime import lock_refused


@pytest.mark.parametrize(
    ("limit", "said"),
    [(8 << 20, "the limit is 8388608 bytes: ulimit -l unlimited"), (resource.RLIM_INFINITY, "sets no limit")],
)
def test_bytes_reason_and_limit_are_named(monkeypatch, limit, said):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    line = lock_refused.said(1 << 30, "cudaHostRegister: error 2")
    assert line.startswith("1073741824 bytes") and "error 2" in line and said in line and "\n" not in line


def test_a_measurement_that_may_not_lock_ends_as_bad_input():
    class Device:
        def pin(self, memory):
            raise RuntimeError("cudaHostRegister of 64 bytes failed with error 2")

    with pytest.raises(InputError, match="host copies of a node: 64 bytes .* error 2"):
        fabric.page_lock(Device(), fabric.torch.zeros(16))
