"""Apply, check and revert the patches in a Megatron tree. Needs neither torch nor megatron."""

from megatron_ext.checkout.patching import TreeReport, apply, check, revert
from megatron_ext.checkout.verify import verify_hooks

__all__ = ["TreeReport", "apply", "check", "revert", "verify_hooks"]
