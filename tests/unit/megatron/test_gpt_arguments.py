"""Options of the model: values that cannot train are refused by name before anything is built."""

import argparse
from types import SimpleNamespace

import pytest

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron import gpt_arguments
from megatron_ext.megatron.optimizer_of_args import optimizer_settings


def parse(*options: str):
    parser = gpt_arguments.OneLineParser(prog="test")
    gpt_arguments.add_gpt_arguments(parser)
    gpt_arguments.add_plan_arguments(parser)
    args = parser.parse_args(list(options))
    gpt_arguments.check(args)
    return args


@pytest.mark.parametrize("name", [*gpt_arguments.LARGEST, *gpt_arguments.PARALLEL])
@pytest.mark.parametrize(("value", "said"), [(0, "must be at least 1"), (10**25, "must be at most [0-9]+")])
def test_sizes_beyond_any_model_are_refused(name, value, said):
    option = f"--{name.replace('_', '-')}"
    with pytest.raises(InputError, match=f"^{option} = {value}: {said}$"):
        parse(option, str(value))


def test_the_defaults_train():
    assert isinstance(parse(), argparse.Namespace)


def test_the_host_optimizer_takes_no_float32_parameters():
    args = SimpleNamespace(bf16=True, fp16=False, optimizer_cpu_offload=True)
    assert optimizer_settings(args).on_host
    with pytest.raises(InputError, match="--optimizer-cpu-offload: Megatron's host optimizer takes no float32"):
        gpt_arguments.check(argparse.Namespace(**vars(parse()) | {"optimizer_cpu_offload": True}))
