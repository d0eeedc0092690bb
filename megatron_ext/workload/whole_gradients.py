"""Options of Megatron with which gradients have to stay whole on the device, in every schedule."""

from collections.abc import Mapping

_LATE = "tensor-parallel ranks add whole gradients of norms after the last reduce"
_TIME = "needs gradients at another time than the schedule has them"
REASONS = {"save_wgrads_interval": _TIME, "delay_wgrad_compute": _TIME, "mtp_num_layers": _TIME}
REASONS |= {"sequence_parallel": _LATE, "qk_layernorm": _LATE}
"""Each option, and why."""


def options_with_whole_gradients(options: Mapping[str, object], tensor_parallel: bool) -> list[str]:
    """Those of the options that are given; none where gradients may come and go."""
    return [name for name, why in REASONS.items() if options.get(name) and (tensor_parallel or why != _LATE)]
