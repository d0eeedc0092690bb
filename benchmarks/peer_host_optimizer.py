"""The example with --optimizer-cpu-offload on a machine without a GPU. Part of peers.py.

Megatron's offloaded optimizer asks each tensor whether it is on a GPU. Under CPU compatibility all
say yes, the host copies too: they would be taken for the GPU's and given no gradient, and nothing
would be learned. Here all copies are the host's, as they are on a GPU with everything offloaded.
"""

import runpy
import sys

from megatron_ext.megatron import cpu_compat

installed = cpu_compat.install()

from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer  # noqa: E402

if installed:
    sort_parameters = HybridDeviceOptimizer._get_sub_optimizer_param_groups

    def all_on_host(self, offload_fraction):
        self.pin_cpu_grads = False  # there is nothing to pin memory for
        host, device, *maps = sort_parameters(self, offload_fraction)
        return host + device, [], *maps

    HybridDeviceOptimizer._get_sub_optimizer_param_groups = all_on_host

sys.argv[0] = "examples/pretrain_gpt_hybrid.py"
runpy.run_path(sys.argv[0], run_name="__main__")
