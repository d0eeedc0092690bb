"""The passes of a plan, in this order: cut, offload, place, step slots, rest states, host step.

Each pass decides one thing, in a file of its name. The search runs the first three many times
(:mod:`megatron_ext.planner.gather_search`). The others follow it once (:mod:`megatron_ext.planner.finish`).
"""
