"""Differences between releases of Megatron: since when they exist, and which files depend on them. Only this file
checks what a release has.

[Note: Releases]
Patches are for core_v0.10.0 to main. Where possible, a release's features are found from a function's arguments or the
names in a module, and not from its version number, because forks have numbers of their own.

| since | what | asked by | in |
|---|---|---|---|
| 0.11 | disable_forward_pre_hook takes param_sync | accepted | scheduled_bucket_group.py |
| 0.11 | an order of experts stays a tensor; before, it is read as numbers | - | describe_from_checkout.py |
| 0.11 | TransformerConfig knows options of experts, in several releases | has_all | gpt_model.py |
| 0.12 | the local layer takes a normalization, which is left out where it is the default | - | gpt_model.py |
| 0.12 | an optimizer steps in host memory | host_optimizer_class | late_model.py, late_memory.py, states_on_device.py |
| 0.13 | a chunk is told its vp_stage; before, a global says it | accepts | gpt_model.py |
| 0.13 | arguments of forward_step and backward_step, in several releases | accepted | layer_runners.py |
| 0.13 | tensor-parallel ranks add up late gradients by a function of another name | late_sum_of | late_sums.py |
| 0.13 | probabilities of padded experts have no mask; before, from 0.12.1 on, they have | - | saved_activations.py |
| 0.13 | a checkpoint says the form of its optimizer states; before, an option alone does | - | checkpoint_layout.py |
| 0.15 | optimizer states of torch_dist are dp_reshardable, or fully reshardable | has_all | checkpoint_states.py |
| 0.16 | a step in host memory waits for its copies of parameters to the device | - | lifecycle.py |
| 0.17 | a reduce over instances waits for the hook that begins it | - | buckets.py |
| 0.17 | an activation is not freed while it is being sent | - | gpt_model.py |
| 0.17 | gradients are counted apart from parameters | - | buckets.py |
| 0.18 | a bucket lists parameters with fp32 gradients of their own | accepted | buckets.py |
| 0.18 | --rampup-batch-size is ignored | ramps_up | workload_of_run.py, refusals.py |
| 0.18 | NullTokenizer adds no end of document | null_tokenizer_adds | ignored_options.py, describe_model.py |
| 0.19 | the factor by which gradients are clipped is on the device | - | host_gradients.py |

Without a name in the third column the code works for all releases. Options that some releases do not have are read with
their neutral value. megatron_on_cpu.py says what the CPU test bench needs for each release.
"""

import contextlib
import inspect
from collections.abc import Callable
from typing import Any


def accepts(function: Callable, name: str) -> bool:
    """Whether ``function`` takes an argument ``name``."""
    return name in inspect.signature(function).parameters


def accepted(function: Callable, **arguments: Any) -> dict[str, Any]:
    """The entries of ``arguments`` that ``function`` takes."""
    return {name: value for name, value in arguments.items() if accepts(function, name)}


def has_all(owner: object, *names: str) -> bool:
    """Whether a module or a class has all of ``names``."""
    return all(hasattr(owner, name) for name in names)


def late_sum_of(module) -> str:
    """The name of the function of ``finalize_model_grads`` with which tensor-parallel ranks add up late gradients."""
    new = "_allreduce_non_tensor_model_parallel_grads"
    return new if has_all(module, new) else "_allreduce_layernorm_grads"


def host_optimizer_class() -> Any:
    """Megatron's class of optimizers that step in host memory. In older releases a class that has no instances, with
    the methods that we replace."""
    with contextlib.suppress(ModuleNotFoundError):
        from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

        return HybridDeviceOptimizer
    replaced = ("dummy_step", "_init_sub_optimizers", "_get_sub_optimizer_param_groups")
    return type("HybridDeviceOptimizer", (), dict.fromkeys(replaced))


def ramps_up() -> bool:
    """Whether this Megatron follows --rampup-batch-size; later releases only print a warning."""
    from megatron.core import num_microbatches_calculator

    return has_all(num_microbatches_calculator, "RampupBatchsizeNumMicroBatchesCalculator")


def null_tokenizer_adds() -> int:
    """The number of tokens that NullTokenizer adds to its vocabulary; without Megatron, that of the latest releases."""
    with contextlib.suppress(ImportError):
        from megatron.core import package_info

        return int((int(package_info.MAJOR), int(package_info.MINOR)) < (0, 18))
    return 0
