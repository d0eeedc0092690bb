"""What Megatron's schedules call around their steps."""

from typing import Protocol


class StepCalls(Protocol):
    """Calls of one iteration; the executor is one. Numbers are those of Megatron's schedule functions."""

    def pre_forward(self, virtual_microbatch_id: int, model_chunk_id: int) -> None: ...

    def pre_backward(self, virtual_microbatch_id: int, model_chunk_id: int) -> None: ...

    def post_backward(self, virtual_microbatch_id: int) -> None: ...

    def end_iteration(self) -> None: ...


class _Idle:
    """What a schedule function holds when nothing is scheduled."""

    __slots__ = ()

    def pre_forward(self, virtual_microbatch_id, model_chunk_id):
        """Nothing is scheduled."""

    def pre_backward(self, virtual_microbatch_id, model_chunk_id):
        """Nothing is scheduled."""

    def post_backward(self, virtual_microbatch_id):
        """Nothing is scheduled."""

    def end_iteration(self):
        """Nothing is scheduled."""


IDLE: StepCalls = _Idle()
