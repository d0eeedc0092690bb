"""Costs in, schedule out."""

from megatron_ext.planner.explain import explain as explain
from megatron_ext.planner.host_notes import delay as delay
from megatron_ext.planner.host_notes import step_note as step_note
from megatron_ext.planner.policies import plan as plan
from megatron_ext.planner.policies import planned as planned
from megatron_ext.planner.policies import search_note as search_note
from megatron_ext.planner.ramp import plan_ramp as plan_ramp
from megatron_ext.planner.ramp import ramp_note as ramp_note
from megatron_ext.planner.ramp import ramp_us as ramp_us
from megatron_ext.planner.set_up_time import never_whole_line as never_whole_line
from megatron_ext.planner.set_up_time import set_up_line as set_up_line
from megatron_ext.planner.verdict import verdict as verdict
