"""What a scheduled run refuses before it begins. Needs no Megatron."""

import contextlib
from types import SimpleNamespace

import pytest
from megatron.core import num_microbatches_calculator
from megatron.core.pipeline_parallel import schedules
from msgspec.structs import replace
from planning_cases import make_table, make_workload

from megatron_ext.checkout.hook_table import SCHEDULE_FUNCTIONS
from megatron_ext.formats.errors import InputError, flag
from megatron_ext.megatron import device_environment, refusals
from megatron_ext.megatron.refusals import (
    NEUTRAL,
    REASONS,
    environment_mismatch,
    refuse_checkpoints,
    refuse_ddp_config,
    refuse_unsupported,
    replaced_options,
    require_hooks,
    schedule_without_hooks,
    warnings_at_start,
)
from megatron_ext.megatron.workload_of_run import numbers_of_run, workload_of_run
from megatron_ext.planner import plan
from megatron_ext.runtime import machine
from megatron_ext.schedule.user_defined_schedule import MeasuredOn, Model, PlanOptions, Schedule, ScheduleMetadata
from megatron_ext.workload.parallel import Parallel


def options(**more):
    """Megatron's arguments as a release without the newer options has them."""
    plain = {
        "use_distributed_optimizer": True,
        "overlap_param_gather": True,
        "optimizer": "adam",
        "context_parallel_size": 1,
        "num_distributed_optimizer_instances": 1,
        "use_torch_fsdp2": False,
        "fp8_param_gather": None,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "tensor_model_parallel_size": 1,
        "data_parallel_size": 2,
        "global_batch_size": 16,
        "micro_batch_size": 2,
        "microbatch_group_size_per_vp_stage": None,
        "rampup_batch_size": None,
        "bf16": False,
        "fp16": False,
    }
    return SimpleNamespace(**plain | more)


def test_a_usual_run_is_accepted():
    for instances in (1, 2):
        refuse_unsupported(options(num_distributed_optimizer_instances=instances))


@pytest.mark.parametrize(
    "name, value",
    [
        ("use_megatron_fsdp", True),
        ("use_custom_fsdp", True),
        ("use_torch_fsdp2", True),
        ("nccl_ub", True),
        ("fp8_param_gather", True),
        ("overlap_moe_expert_parallel_comm", True),
        ("ddp_param_name_patterns_for_fp32_local_accumulation", ["all"]),
        ("use_layer_wise_distributed_optimizer", True),
        ("optimizer", "dist_muon"),
        ("optimizer", "sgd"),
        ("cuda_graph_scope", ["full_iteration"]),
        ("cuda_graph_scope", "CudaGraphScope.full_iteration"),
        ("use_distributed_optimizer", False),
        ("overlap_param_gather", False),
        ("freeze_all_layers", True),
        ("cuda_graph_impl", "local"),
        ("cuda_graph_impl", "transformer_engine"),
        ("enable_cuda_graph", True),
        ("external_cuda_graph", True),
        ("qk_clip", True),
        ("defer_embedding_wgrad_compute", True),
        ("overlap_dispatch_backward_with_experts_wgrad", True),
        ("chunked_optimizer_state_offload", True),
        ("offload_optimizer_states", True),
        ("disable_param_buffers_cpu_backup", True),
        ("dynamic_context_parallel", True),
        ("sequence_packing_scheduler", "dp_balanced"),
        ("inprocess_restart", True),
        ("ddp_reduce_scatter_with_fp32_accumulation", True),
    ],
)
def test_what_cannot_be_combined_is_refused_by_name(name, value):
    with pytest.raises(InputError) as refused:
        refuse_unsupported(options(**{name: value}))
    assert str(refused.value).startswith(f"{flag(name)}" + (": " if isinstance(value, bool) else " = "))
    assert "--user-defined-schedule" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fp8_param_gather", "scales"),
        ("cuda_graph_impl", "does not run the forward of its layers"),
        ("fine_grained_activation_offloading", "use the same link as host copies"),
    ],
)
def test_the_reason_is_said(name, reason):
    with pytest.raises(InputError, match=f"--user-defined-schedule: .*{reason}"):
        refuse_unsupported(options(**{name: 2}))
    assert {*NEUTRAL} <= {*REASONS}


def test_defaults_of_options_that_are_refused_are_accepted():
    refuse_unsupported(
        options(cuda_graph_impl="none", enable_cuda_graph=False, qk_clip=False, cuda_graph_scope=["attn", "mlp"])
    )


def test_a_copy_of_gradients_that_a_script_asks_for_itself_is_refused():
    usual = {"use_distributed_optimizer": True, "overlap_param_gather": True}
    refuse_ddp_config(SimpleNamespace(**usual, reduce_scatter_with_fp32_accumulation=False))
    with pytest.raises(InputError, match="--ddp-reduce-scatter-with-fp32-accumulation: .* second copy"):
        refuse_ddp_config(SimpleNamespace(**usual, reduce_scatter_with_fp32_accumulation=True))


@pytest.mark.parametrize("of", ["", "expert_"])
def test_weights_that_other_ranks_share_are_refused(of):
    shards = {f"{of}tensor_parallel_num_weight_shards": 2}
    refuse_unsupported(options(**shards, **{f"{of}gtp_weight_remat_size": 1}))
    with pytest.raises(InputError, match=f"--{of.replace('_', '-')}tensor-parallel-num-weight-shards = 2"):
        refuse_unsupported(options(**shards, **{f"{of}gtp_weight_remat_size": 2}))


def test_an_unpatched_tree_is_refused(tmp_path):
    place = tmp_path / "megatron/core/distributed/distributed_data_parallel.py"
    place.parent.mkdir(parents=True)
    place.write_text("class DistributedDataParallel:\n    def __init__(self):\n        pass\n")
    with pytest.raises(InputError, match="ddp.built.*run `megatron-ext patch check"):
        require_hooks(tmp_path)


def test_parallel_sizes_of_megatrons_own_arguments(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    parallel = workload_of_run(options()).parallel
    assert (parallel.pp, parallel.vp, parallel.dp, parallel.num_microbatches) == (2, 2, 2, 4)
    assert (parallel.order, parallel.node_size) == ("interleaved", 4)
    spread = workload_of_run(options(context_parallel_size=2)).parallel  # a replica's parameters, on twice the ranks
    assert (spread.dp, spread.num_microbatches) == (4, 4)
    plain = workload_of_run(options(virtual_pipeline_model_parallel_size=None)).parallel
    assert (plain.order, plain.vp) == ("1f1b", 1)
    single = options(pipeline_model_parallel_size=1, virtual_pipeline_model_parallel_size=None)
    assert workload_of_run(single).parallel.order == "no_pipeline"


def test_a_release_that_ignores_the_ramp_is_taken_at_its_word(monkeypatch):
    given, follows = options(rampup_batch_size=["4", "4", "100"]), "RampupBatchsizeNumMicroBatchesCalculator"
    monkeypatch.setattr(num_microbatches_calculator, follows, None, raising=False)
    assert numbers_of_run(given) == (1, 2, 3, 4)
    assert replaced_options(given) == []
    monkeypatch.delattr(num_microbatches_calculator, follows)
    assert numbers_of_run(given) == (4,)
    assert "--rampup-batch-size: this release of Megatron ignores it" in replaced_options(given)[0]


def test_an_option_whose_part_the_schedule_takes_is_accepted_and_named():
    given = options(overlap_param_gather_with_optimizer_step=True)
    refuse_unsupported(given)
    assert replaced_options(given) == [
        "--overlap-param-gather-with-optimizer-step: ignored, because the schedule says when gathers begin"
    ]
    assert replaced_options(options()) == []


def test_a_batch_that_is_decreased_is_so_in_every_iteration():
    given = options(decrease_batch_size_if_needed=True)
    given.global_batch_size += given.micro_batch_size * given.data_parallel_size - 1
    assert workload_of_run(given).parallel == workload_of_run(options()).parallel


def planned(measured_on: MeasuredOn | None = None) -> Schedule:
    return Schedule(
        schema_version=3,
        kind="user_defined_schedule",
        metadata=ScheduleMetadata(planner="hybrid", options=PlanOptions(measured_on=measured_on)),
        zero_stage=1,
        parallel=Parallel(
            pipeline_model_parallel_size=1, data_parallel_size=2, num_microbatches=1, order="no_pipeline"
        ),
        model=Model(fingerprint=""),
        groups=(),
        ranks=(),
    )


def test_a_schedule_planned_from_costs_of_another_machine_is_said_so():
    here = machine.environment()
    assert environment_mismatch(planned(), "s.json") == []  # made-up costs, or an older schedule
    assert environment_mismatch(planned(MeasuredOn(**here)), "s.json") == []
    other = here["hardware"] | {"processor": "another one"}
    (said,) = environment_mismatch(planned(MeasuredOn(hardware=other)), "s.json")
    assert (
        said.startswith(
            "s.json: planned from costs of another environment (hardware.processor: table another one, here"
        )
        and "\n" not in said
    )


@pytest.mark.parametrize("name", sorted(SCHEDULE_FUNCTIONS))
def test_the_schedules_with_hooks_pass(name, monkeypatch):
    function = getattr(schedules, name)
    monkeypatch.setattr(schedules, "get_forward_backward_func", lambda: function)
    assert schedule_without_hooks() is None


def test_another_schedule_is_named(monkeypatch):
    def zero_bubble(): ...

    monkeypatch.setattr(schedules, "get_forward_backward_func", lambda: zero_bubble)
    assert "zero_bubble, which has no hooks" in (schedule_without_hooks() or "")


def test_what_libraries_on_a_gpu_read_is_set_before_they_start():
    plain, scheduled, checked = {}, {}, {"NCCL_NVLS_ENABLE": "1"}
    device_environment.prepare(["--bf16"], plain)
    device_environment.prepare(["--user-defined-schedule=s.json"], scheduled)
    device_environment.prepare(["--user-defined-schedule", "s.json", "--user-defined-schedule-check", "r"], checked)
    assert plain == {} and scheduled == device_environment.SCHEDULED
    assert checked == device_environment.SCHEDULED | device_environment.REPEATABLE | {"NCCL_NVLS_ENABLE": "1"}


def test_megatron_that_is_imported_above_the_first_hook_is_told():
    said = device_environment.said_of_early_import(["NVTE_X"], ["torch", "megatron.core", "megatron.core.utils"])
    assert said is not None and said.startswith("megatron.core is imported above the first hook") and "NVTE_X" in said
    assert device_environment.said_of_early_import([], ["megatron.core"]) is None
    assert device_environment.said_of_early_import(["NVTE_X"], ["torch", "megatron_ext.cli"]) is None
    assert device_environment.prepare(["--user-defined-schedule=s"], {"TORCH_NCCL_AVOID_RECORD_STREAMS": "0"}) == []
    assert device_environment.prepare(["--user-defined-schedule=s"], {}) == list(device_environment.SCHEDULED)


def test_what_costs_memory_or_time_beside_a_schedule_is_said():
    schedule = planned()
    assert warnings_at_start(options(), schedule) == []
    (line,) = warnings_at_start(options(check_for_nan_in_loss_and_grad=True, fp8="hybrid"), schedule)
    assert "once per bucket" in line
    (line,) = warnings_at_start(options(fp8="hybrid"), replace(schedule, zero_stage=3))
    assert line.startswith("--fp8-format hybrid: Transformer Engine keeps fp8 copies")


@pytest.mark.parametrize(("spare", "whole"), [(0, True), (-1, False)])
def test_that_parameters_never_fit_whole_is_said(spare, whole):
    work = make_workload(zero_stage=3, whole_parameter_bytes=100_000, layers=4)
    schedule = plan(work, make_table(work), policy="random:3")
    need = max(
        memory.device_total_bytes
        - memory.device_bytes["whole_parameters"]
        + sum(group.bytes for group in schedule.groups if group.pp_rank == rank)
        for rank, memory in enumerate(schedule.predicted.memory)
    )
    limited = replace(schedule, limits=replace(schedule.limits, device_bytes=need + spare))
    lines = warnings_at_start(options(), limited)
    assert (lines == []) == whole
    assert whole or "bring one group after the other" in lines[0]
    saving = SimpleNamespace(save="folder", ckpt_format="torch")
    refused = pytest.raises(InputError, match="--ckpt-format = 'torch': .* 1 bytes more .* torch_dist")
    with contextlib.nullcontext() if whole else refused:
        refuse_checkpoints(saving, limited)
    refuse_checkpoints(SimpleNamespace(save="folder", ckpt_format="torch_dcp"), limited)
    refuse_checkpoints(SimpleNamespace(save=None, ckpt_format="torch"), limited)


def saving(**options) -> SimpleNamespace:
    return SimpleNamespace(save="folder", **options)


def test_a_writer_that_shares_states_in_host_memory_is_refused():
    how = dict(async_save=True, use_persistent_ckpt_worker=True, optimizer_cpu_offload=True)
    for other in how:
        refuse_checkpoints(saving(**how | {other: False}), planned())
    with pytest.raises(InputError, match="--use-persistent-ckpt-worker: .* states in host memory while training"):
        refuse_checkpoints(saving(**how), planned())


def test_a_save_beside_training_is_refused_where_the_writer_does_not_see_the_states():
    plain = planned()
    slots = lambda states, cast: replace(plain, state_slots=states, step_slots=cast and SimpleNamespace(cast=cast))
    for own in (slots(None, None), slots(None, "host")):
        refuse_checkpoints(saving(async_save=True), own)
    for own, why in (
        (slots(1, None), "would write states that the next step has already changed"),
        (slots(None, "device"), "cannot read the page-locked parameters"),
    ):
        refuse_checkpoints(saving(async_save=False), own)
        refuse_checkpoints(saving(), own)
        with pytest.raises(InputError, match=f"--async-save: .*{why}"):
            refuse_checkpoints(saving(async_save=True), own)


@pytest.mark.parametrize("there", [True, False])
def test_a_package_without_which_the_writer_of_checkpoints_waits_for_ever(monkeypatch, there):
    monkeypatch.setattr(refusals, "find_spec", {"psutil": there or None}.__getitem__)
    schedule = planned()
    with contextlib.nullcontext() if there else pytest.raises(InputError, match="'torch_dist': .*pip install psutil"):
        refuse_checkpoints(saving(ckpt_format="torch_dist"), schedule)
    refuse_checkpoints(saving(ckpt_format="torch"), schedule)
    refuse_checkpoints(SimpleNamespace(save=None, ckpt_format="torch_dist"), schedule)
