"""Costs in, schedule out."""

from megatron_ext.planner.plan import POLICIES, plan
from megatron_ext.planner.verdict import Verdict, verdict

__all__ = ["POLICIES", "Verdict", "plan", "verdict"]
