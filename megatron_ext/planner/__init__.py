"""Costs in, schedule out."""

from megatron_ext.planner.explain import explain
from megatron_ext.planner.host_notes import delay, step_note
from megatron_ext.planner.policies import plan, planned, search_note
from megatron_ext.planner.ramp import plan_ramp, ramp_note, ramp_us
from megatron_ext.planner.set_up_time import never_whole_line, set_up_line
from megatron_ext.planner.verdict import Verdict, verdict

__all__ = [
    "Verdict",
    "delay",
    "explain",
    "never_whole_line",
    "plan",
    "planned",
    "plan_ramp",
    "ramp_note",
    "ramp_us",
    "search_note",
    "set_up_line",
    "step_note",
    "verdict",
]
