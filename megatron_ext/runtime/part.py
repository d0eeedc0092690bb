"""What takes part in every iteration besides the program's own gathers: gradients, publishing, the host's optimizer."""


class Part:
    """The executor calls these on the training thread, of all parts in their order. Most parts need a few of them."""

    def begin(self) -> None:
        """An iteration begins."""

    def end(self) -> None:
        """The last backward has ended; the optimizer may change gradients next."""

    def release(self, iterations: int) -> None:
        """No group is whole any more, and shards may change next; ``iterations`` have ended on this rank."""

    def updated(self, iterations: int, by_optimizer: bool) -> None:
        """The shards have new values; not ``by_optimizer``: values that the host's optimizer does not know."""

    def skipped(self) -> None:
        """The optimizer does not step: parameters are as they were."""

    def changed(self) -> None:
        """Whole parameters have got values that no optimizer wrote."""

    def settled(self) -> None:
        """Return when shards may change; between two iterations."""

    def close(self) -> None:
        """The run ends. Called in the reverse order."""
