"""A model of two layer kinds, as ``--modules layers:layer_runners`` hands it over."""

import torch


class Layer:
    def __init__(self, width: int):
        self.module = torch.nn.Sequential(
            torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Linear(2 * width, width)
        )
        self.input = torch.randn(16, width, requires_grad=True)
        self.calls: list[str] = []
        self.outputs: list[torch.Tensor] = []

    def forward(self) -> None:
        self.calls.append("forward")
        self.outputs.append(self.module(self.input))

    def backward(self) -> None:
        self.calls.append("backward")
        output = self.outputs.pop()
        output.backward(torch.ones_like(output))


def layer_runners(args: list[str]) -> dict[str, Layer]:
    width = int(args[0]) if args else 32
    return {"narrow": Layer(width), "wide": Layer(8 * width)}


def freeing_outputs(args: list[str]):
    """The real model's layers as on a CUDA device, where the pipeline frees what it has sent
    (``deallocate_pipeline_outputs``)."""
    from megatron_ext.megatron import layer_runners  # before any other module of Megatron's
    from megatron_ext.megatron import gpt_model  # isort: skip

    plain = gpt_model.transformer_config

    def config_of(args, **more):
        config = plain(args, **more)  # which has it off without a device, whatever is asked for
        config.deallocate_pipeline_outputs = more.get("deallocate_pipeline_outputs", True)
        return config

    gpt_model.transformer_config = config_of
    return layer_runners.layer_runners(args)


def balanced_experts(args: list[str]):
    """The real model's layers, whose experts count their tokens: every expert gets as many as another."""
    from megatron_ext.megatron import layer_runners  # before any other module of Megatron's
    from megatron.core.transformer.moe import experts  # isort: skip

    compute = experts.SequentialMLP.forward

    def counted(self, tokens, tokens_of_each, *more):
        assert self.num_local_experts == 2 and len({*tokens_of_each.tolist()}) == 1, tokens_of_each
        assert len(tokens) == 2 * 16  # of 2 ranks with 16 tokens each, which go to 2 of all 4 experts: one of them here
        return compute(self, tokens, tokens_of_each, *more)

    experts.SequentialMLP.forward = counted
    return layer_runners.layer_runners(args)


def nothing(args: list[str]) -> dict:
    return {}


def hanging(args: list[str]):
    """Layers of a rank whose first forward never ends, which is soon noticed."""
    from time import sleep

    from megatron_ext.measure import rank_program

    rank_program.START_SECONDS = 1.0

    def forward(self):
        sleep(3600)

    Layer.forward = forward
    return layer_runners(args)


def hanging_contention(args: list[str]):
    """Layers of a rank whose contention never ends, as where a driver does not return."""
    from time import sleep

    from megatron_ext.measure import contention

    contention.run = lambda *args: sleep(3600)
    return layer_runners(args)
