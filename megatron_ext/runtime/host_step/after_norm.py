"""Steps of the host's optimizer once the gradient norm is known. While one unit is stepped, the gradients of the next
units arrive and the parameters of the previous ones leave."""

from collections import deque
from time import perf_counter_ns

from megatron_ext.runtime.host_step.room import StepStreams
from megatron_ext.runtime.host_step.unit import HostUnit


class AfterNorm:
    """Runs on one rank, on the training thread, which steps and issues.

    Args:
        link: the streams that all units' rooms use.
    """

    def __init__(self, link: StepStreams):
        self._link, self._device, self._computed = link, link.device, link.device.event()
        self._expected: deque[HostUnit] = deque()
        self._left = 0  # number of units that are not stepped yet

    def expect(self, units: list[HostUnit]) -> None:
        """``units`` are stepped next, in this order. Their gradients are final when the compute stream has done its
        work. Copies to the device may still read shards in host memory. A step writes the shards of a unit only after
        the flag of its gradients, and so after these copies."""
        assert not self._expected
        self._expected.extend(units)
        self._left = len(units)
        self._device.compute.record(self._computed)  # on the stream on which Megatron copies gradients, after compute
        for unit in units:
            unit.stepped = self._stepped
        self._fill()

    def _fill(self) -> None:
        while self._expected and self._expected[0].has_room():
            self._expected.popleft().arrive([self._computed])

    def _stepped(self, unit: HostUnit) -> None:
        self._link.recorder.add("host_step", str(unit.group), unit.begun_ns, perf_counter_ns())
        unit.stepped = lambda unit: None
        unit.leave()
        self._fill()
        self._left -= 1
        if not self._left:
            self._link.wait_for_leaves()
