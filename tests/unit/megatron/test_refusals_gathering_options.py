"""Options of all releases whose name says graph, offload or param gather: each is refused, or known to do no harm.

Source: ``megatron/training/arguments.py`` of the tags core_v0.12.0 to core_v0.19.0, of main and dev (2026-08), and the
fields of TransformerConfig, ModelParallelConfig, OptimizerConfig, DistributedDataParallelConfig and
``megatron/training/config``, from which the parser makes options since 0.16.
"""

import dataclasses
import re
from types import SimpleNamespace

import pytest

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron.refusals import NEUTRAL, refuse_unsupported

WORDS = re.compile("graph|offload|param_gather|param_ag")

REFUSED = """
    chunked_optimizer_state_offload cpu_offloading_num_layers cuda_graph_impl enable_cuda_graph
    external_cuda_graph fine_grained_activation_offloading fp4_param_gather fp8_param_gather offload_optimizer_states
    optimizer_cuda_graph reuse_grad_buf_for_mxfp8_param_ag
""".split()

HARMLESS = {
    "part of an option that is refused": """
        _cpu_offloading_context activation_offload_fraction cpu_offloading cpu_offloading_activations
        cpu_offloading_double_buffering cpu_offloading_retain_pinned_cpu_buffers cpu_offloading_weights
        cuda_graph_modules
        cuda_graph_retain_backward_graph cuda_graph_scope cuda_graph_use_single_mempool cuda_graph_warmup_steps
        delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks
        fine_grained_offloading_max_inflight_offloads megatron_fsdp_cuda_graph_mode
        megatron_fsdp_enable_fine_grained_param_gather min_offloaded_tensor_size offload_modules
        optimizer_state_offload_chunk_size_mb optimizer_state_offload_fraction
    """,
    "of inference": """
        decode_only_cuda_graphs inference_cuda_graph_all_prefills inference_cuda_graph_max_tokens
        inference_cuda_graph_scope inference_dynamic_batching_cuda_graph_max_tokens
        inference_dynamic_batching_cuda_graph_mixed_prefill_count
        inference_dynamic_batching_cuda_graph_sizing_distribution inference_dynamic_batching_num_cuda_graphs
        moe_pad_experts_for_cuda_graph_inference
    """,
    "of reinforcement learning, which --perform-rl-step begins and which is refused": """
        rl_offload_inference_model_weights_when_idle rl_offload_kv_cache_during_training
        rl_offload_optimizer_during_inference rl_persist_cuda_graphs rl_reset_cuda_graphs rl_training_cuda_graphs
    """,
    "trained with a schedule in tests/distributed/megatron/test_parity.py": """
        optimizer_cpu_offload optimizer_offload_fraction use_torch_optimizer_for_cpu_offload
    """,
    "needed, or says when Megatron's own gathers begin, which a schedule replaces": """
        align_param_gather no_align_param_gather overlap_param_gather overlap_param_gather_with_optimizer_step
    """,
}


def options(**more):
    return SimpleNamespace(use_distributed_optimizer=True, overlap_param_gather=True, **more)


@pytest.mark.parametrize("name", [*REFUSED, "perform_rl_step", "moe_single_grouped_weight", "moe_single_grouped_bias"])
def test_an_option_that_would_change_what_a_schedule_does_is_refused(name):
    value = "local" if name == "cuda_graph_impl" else True
    with pytest.raises(InputError, match="--" + name.replace("_", "-")):
        refuse_unsupported(options(**{name: value}))
    refuse_unsupported(options(**{name: NEUTRAL[name]}))


def test_every_such_option_of_the_release_under_test_is_listed():
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    found = {
        field.name
        for config in (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
        for field in dataclasses.fields(config)
        if WORDS.search(field.name)
    }
    harmless = {name for names in HARMLESS.values() for name in names.split()}
    assert len(found) > 20
    assert found <= {*REFUSED} | harmless
    assert not {*REFUSED} & harmless
    assert {name for name in NEUTRAL if WORDS.search(name)} == {*REFUSED}
