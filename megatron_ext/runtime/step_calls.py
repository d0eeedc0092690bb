"""What Megatron's schedules call around their steps."""


class StepCalls:
    """Calls of one iteration; the executor is one. Numbers are those of Megatron's schedule functions. Here nothing is
    scheduled."""

    def pre_forward(self, virtual_microbatch_id: int, model_chunk_id: int) -> None:
        """A forward of a chunk begins."""

    def pre_backward(self, virtual_microbatch_id: int, model_chunk_id: int) -> None:
        """A backward of a chunk begins."""

    def post_backward(self, virtual_microbatch_id: int) -> None:
        """It has ended."""

    def end_iteration(self) -> None:
        """The last step has ended."""


IDLE = StepCalls()
