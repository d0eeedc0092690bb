"""Options of Megatron with which gradients have to stay whole on the device, in every schedule."""

from collections.abc import Mapping

_LATE = "tensor-parallel ranks add whole gradients of norms after the last reduce"
_TIME = "it needs gradients at a time when the schedule may not have them"
REASONS = {"save_wgrads_interval": _TIME, "delay_wgrad_compute": _TIME, "mtp_num_layers": _TIME}
REASONS |= {"sequence_parallel": _LATE, "qk_layernorm": _LATE}
"""Each option, and why."""


def may_rest_on_host(dtype: str, optimizer_on_host: bool) -> bool:
    """Whether gradients of parameters of ``dtype`` may be added up in host memory. Megatron's host optimizer would not
    unscale those of float16."""
    return not (optimizer_on_host and dtype == "float16")


def options_with_whole_gradients(options: Mapping[str, object], tensor_parallel: bool) -> list[str]:
    """The given options with which whole gradients stay on the device, in the order of :data:`REASONS`."""
    return [name for name, why in REASONS.items() if options.get(name) and (tensor_parallel or why != _LATE)]
