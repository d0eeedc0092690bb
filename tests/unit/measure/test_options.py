"""Values of ``measure`` beyond any machine are refused in one line."""

import pytest

from megatron_ext.formats.errors import InputError
from megatron_ext.measure.options import Options

HUGE = 10**25


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, HUGE) for name in ("max_bytes", "max_rank_bytes", "hidden_size", "seq_length")),
        *((name, (512, HUGE)) for name in ("sizes", "also_sizes")),
        *((name, HUGE) for name in ("threads", "seconds", "data_parallel_size", "pipeline_model_parallel_size")),
    ],
)
def test_a_value_beyond_any_machine_is_refused(name, value):
    assert Options().check()
    with pytest.raises(InputError, match=r"^--[a-z-]+: .*(memory of \d+ bytes|must be at most|more than 64 ranks)"):
        Options(**{name: value}).check()
