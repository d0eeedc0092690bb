"""Costs in, schedule out."""

from megatron_ext.planner.plan import POLICIES, plan
from megatron_ext.simulator.verdict import Verdict, verdict

__all__ = ["POLICIES", "Verdict", "plan", "verdict"]
