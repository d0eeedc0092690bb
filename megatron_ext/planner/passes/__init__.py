"""The passes of a plan, in this order: cut, offload, place, step slots, rest states, host step.

Each decides one thing in a file of its name. The search goes through the first three many times
(:mod:`megatron_ext.planner.search`), the others follow it once (:mod:`megatron_ext.planner.finish`).
"""
