"""Parallel sizes: which ranks share the shards of dense parameters and of experts, and what Megatron refuses."""

import pytest
from megatron.core.parallel_state import RankGenerator
from msgspec.structs import replace
from parallel_sizes import sized

from megatron_ext.formats.errors import InputError
from megatron_ext.workload.workload import SCHEMA_VERSION, Experts, Workload, check


@pytest.mark.parametrize(
    "pp, dp, tp, ep, etp", [(1, 4, 1, 2, None), (2, 4, 2, 2, 1), (2, 4, 2, 4, None), (1, 2, 4, 2, 2), (2, 3, 2, 1, 1)]
)
def test_replicas_are_megatrons_groups(pp, dp, tp, ep, etp):
    sizes = sized(pp=pp, dp=dp, tp=tp, ep=ep, etp=etp, microbatches=4)
    sizes.check()
    dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=1, order="tp-cp-ep-dp-pp")
    expert = RankGenerator(tp=sizes.etp, ep=ep, dp=sizes.expert_dp, pp=pp, cp=1, order="tp-cp-ep-dp-pp")
    for ranks, generator in ((sizes.dp, dense), (sizes.expert_dp, expert)):
        ours = [list(members) for pp_rank in range(pp) for members in sizes.replicas(pp_rank, ranks)]
        assert sorted(ours) == sorted(generator.get_ranks("dp"))
    assert [sizes.ranks_of(kind) for kind in (False, True)] == [dp, tp * dp // (sizes.etp * ep)]


@pytest.mark.parametrize("pp, dp, tp, ep, instances", [(1, 4, 1, 1, 2), (2, 8, 2, 2, 2), (2, 8, 2, 2, 4)])
def test_shards_lie_over_megatrons_instances(pp, dp, tp, ep, instances):
    """Megatron cuts the ranks that hold the same parameters in as many runs (parallel_state.py)."""
    sizes = sized(pp=pp, dp=dp, tp=tp, ep=ep, etp=tp, microbatches=4, instances=instances)
    sizes.check()
    for ranks, whole, of_model in ((sizes.dp, dp, tp), (sizes.expert_dp, dp // ep, tp * ep)):
        generator = RankGenerator(tp=of_model, ep=1, dp=whole, pp=pp, cp=1, order="tp-cp-ep-dp-pp")
        cut = [own[i : i + ranks] for own in generator.get_ranks("dp") for i in range(0, whole, ranks)]
        assert whole == ranks * instances
        assert sorted(list(own) for pp_rank in range(pp) for own in sizes.replicas(pp_rank, ranks)) == sorted(cut)
    assert sizes.world_size == pp * dp * tp and sizes.global_rank(pp - 1, dp - 1) == sizes.world_size - tp


@pytest.mark.parametrize("ep, said", [(1, "does not divide the 6 data-parallel"), (3, "the 2 expert-data-parallel")])
def test_instances_that_do_not_divide_the_ranks_are_refused(ep, said):
    with pytest.raises(InputError, match=f"parallel.num_distributed_optimizer_instances = .: .*{said}"):
        sized(dp=6, ep=ep, microbatches=6, instances=4 if ep == 1 else 3).check()


def test_a_rank_is_in_the_set_of_the_first_tensor_parallel_rank():
    sizes = sized(pp=2, dp=3, tp=2, microbatches=4)
    for pp_rank, dp_rank in ((0, 2), (1, 0), (1, 2)):
        assert sizes.replicas(pp_rank)[0][dp_rank] == sizes.global_rank(pp_rank, dp_rank)


def test_experts_that_do_not_divide_the_ranks_are_refused_in_megatrons_words():
    with pytest.raises(InputError) as refused:
        sized(dp=4, ep=3, microbatches=4).check()
    assert refused.value.field == "parallel.expert_model_parallel_size"
    said = "world_size (4) is not divisible by expert_tensor_model_pipeline_parallel size (3)"
    assert said in str(refused.value)


def test_experts_that_do_not_divide_over_ranks_are_refused_in_megatrons_words():
    parallel = sized(dp=4, ep=4, microbatches=4)
    work = Workload(schema_version=SCHEMA_VERSION, kind="workload", parallel=parallel, zero_stage=1, chunks=())
    check(replace(work, experts=Experts(num_experts=8, router_topk=2)))
    for experts, said in (
        (Experts(num_experts=6, router_topk=2), "Number of experts should be a multiple of expert model parallel_size"),
        (Experts(num_experts=4, router_topk=5), "experts.router_topk = 5: there are 4 experts"),
    ):
        with pytest.raises(InputError, match=said):
            check(replace(work, experts=experts))
