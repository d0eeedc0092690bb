"""Options with which gradients stay whole: what a description says and what a run refuses is the same."""

from types import SimpleNamespace

import pytest

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron.refusals import refuse_with_gradients
from megatron_ext.workload.whole_gradients import OPTIONS, options_with_whole_gradients


@pytest.mark.parametrize("name", OPTIONS)
def test_what_is_described_is_what_is_refused(name):
    args = SimpleNamespace(**{name: 1})
    assert options_with_whole_gradients(vars(args)) == [name]
    for given in ((args, SimpleNamespace()), (SimpleNamespace(), args)):
        with pytest.raises(InputError, match=f"--{name.replace('_', '-')} = 1: .*; keep `gradients` whole"):
            refuse_with_gradients(*given, on_host=False)


def test_unscaled_gradients_stay_off_the_host():
    args = SimpleNamespace(fp16=True, optimizer_cpu_offload=True)
    refuse_with_gradients(args, SimpleNamespace(), on_host=False)
    with pytest.raises(InputError, match="--fp16: gradients in host memory"):
        refuse_with_gradients(args, SimpleNamespace(), on_host=True)
