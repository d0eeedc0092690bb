"""The methods that Megatron's schedules call around their steps."""


class StepCalls:
    """Calls of one iteration; the executor is a subclass. Numbers are those of Megatron's schedule functions. The
    methods of this class do nothing."""

    def pre_forward(self, virtual_microbatch_id: int, model_chunk_id: int) -> None:
        """A forward of a chunk begins."""

    def pre_backward(self, virtual_microbatch_id: int, model_chunk_id: int) -> None:
        """A backward of a chunk begins."""

    def post_backward(self, virtual_microbatch_id: int) -> None:
        """The backward has ended."""

    def end_iteration(self) -> None:
        """The last step of the iteration has ended."""


IDLE = StepCalls()
