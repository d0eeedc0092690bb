"""What a schedule would take."""

from megatron_ext.simulator.simulate import Result, simulate

__all__ = ["Result", "simulate"]
