"""Apply, check and revert the patches in a Megatron tree. Needs neither torch nor megatron."""

from megatron_ext.checkout.patching import Report, apply, check, revert
from megatron_ext.checkout.verify import Problem, verify_hooks

__all__ = ["Problem", "Report", "apply", "check", "revert", "verify_hooks"]
