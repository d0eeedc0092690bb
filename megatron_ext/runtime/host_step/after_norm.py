"""Steps of the host's optimizer when the gradient norm is known: gradients of the next units arrive, and parameters of
the last ones leave, while one is stepped."""

from collections import deque
from time import perf_counter_ns

from megatron_ext.runtime.host_step.room import Link
from megatron_ext.runtime.host_step.unit import HostUnit


class AfterNorm:
    """Of one rank; on the training thread, which steps and issues.

    Args:
        link: of the rooms of all units.
    """

    def __init__(self, link: Link):
        self._link, self._device, self._computed = link, link.device, link.device.event()
        self._expected: deque[HostUnit] = deque()
        self._left = 0  # units that are not stepped yet

    def expect(self, units: list[HostUnit]) -> None:
        """``units`` are stepped next, in this order, on what their gradients are when the compute stream has done its
        work. Copies to the device may still read shards in host memory: a step writes a unit's behind the flag of its
        gradients, and so behind them."""
        assert not self._expected
        self._expected.extend(units)
        self._left = len(units)
        self._device.compute.record(self._computed)  # of the stream that Megatron copies gradients on, behind compute
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
