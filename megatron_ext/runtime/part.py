"""Base class of the parts of an iteration besides the gathers: gradients, publishing, the host's optimizer."""


class Part:
    """The executor calls these methods on the training thread, of all parts in order. Most parts need a few of them."""

    def begin(self) -> None:
        """An iteration begins."""

    def end(self) -> None:
        """The last backward has ended; the optimizer may change gradients next."""

    def release(self, iterations: int) -> None:
        """All whole copies are dropped, and shards may change next; ``iterations`` have ended on this rank."""

    def updated(self, iterations: int, by_optimizer: bool) -> None:
        """The shards have new values. ``by_optimizer`` False: the host's optimizer does not have these values."""

    def skipped(self) -> None:
        """The optimizer does not step: parameters do not change."""

    def changed(self) -> None:
        """Whole parameters have new values that no optimizer wrote."""

    def settled(self) -> None:
        """Wait until shards may change; called between two iterations."""

    def close(self) -> None:
        """The run ends. Called in reverse order of the parts."""
