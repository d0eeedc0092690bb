"""Options of Megatron with which gradients have to stay whole on the device, in every schedule."""

from collections.abc import Mapping

OPTIONS = ("save_wgrads_interval", "delay_wgrad_compute", "mtp_num_layers")
REASON = "it needs gradients at a time when the schedule may not have them"
"""Why gradients stay whole with these options."""


def may_rest_on_host(dtype: str, optimizer_on_host: bool) -> bool:
    """Whether gradients of parameters of ``dtype`` may be added up in host memory. Megatron's host optimizer would not
    unscale those of float16."""
    return not (optimizer_on_host and dtype == "float16")


def options_with_whole_gradients(options: Mapping[str, object]) -> list[str]:
    """The given options with which whole gradients stay on the device, in the order of :data:`OPTIONS`."""
    return [name for name in OPTIONS if options.get(name)]
