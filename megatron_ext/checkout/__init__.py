"""A Megatron tree: obtain one, and apply, check and revert the patches. Needs neither torch
nor megatron."""

from megatron_ext.checkout.download import obtain
from megatron_ext.checkout.patching import Report, apply, check, revert
from megatron_ext.checkout.verify import Problem, verify_hooks

__all__ = ["Problem", "Report", "apply", "check", "obtain", "revert", "verify_hooks"]
