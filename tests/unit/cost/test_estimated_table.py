"""Cost tables from data sheets: operations, bytes and links against counts by hand."""

import pytest
from msgspec.structs import replace
from parallel_sizes import sized

from megatron_ext.cost import hardware_sheet as sheets
from megatron_ext.cost.combine_tables import combine
from megatron_ext.cost.cost_table import CAST_ON_DEVICE, JOINED, Compute, Curve, Point
from megatron_ext.cost.estimated_links import SheetLinks
from megatron_ext.cost.estimated_table import estimate, refuse_batch
from megatron_ext.cost.estimates import Costs
from megatron_ext.cost.layer_work import (
    SCORE_PASSES,
    Work,
    experts_share,
    forward_work,
    layer_parameters,
    recomputed_work,
)
from megatron_ext.formats.errors import InputError
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload import workload
from megatron_ext.workload.bucket_layout import ITEM_BYTES
from megatron_ext.workload.gpt_shapes import GptShape, MicroBatch, gpt_workload
from megatron_ext.workload.optimizer_settings import OptimizerSettings

GPT = GptShape(
    layers=4, hidden=256, ffn=1024, heads=8, query_groups=8, vocab=1024, head_dim=32, positions=64, tied=False
)
LLAMA = GptShape(4, 256, 768, 8, 2, 1024, 32, gated=True, rms_norm=True, linear_bias=False, qkv_bias=False, tied=True)


def flop(work: Work) -> float:
    """Operations of all its products."""
    return sum(own for own, _ in work.products) + work.score_flop


def run_of(shape=GPT, *, pp=1, vp=1, dp=8, tp=1, microbatches=4, gpus_per_node=8, batch=None, instances=1):
    how = dict(microbatches=microbatches, gpus_per_node=gpus_per_node, instances=instances)
    parallel = sized(pp=pp, vp=vp, dp=dp, tp=tp, **how)
    batch = batch or MicroBatch(64, 2)
    return gpt_workload(shape, parallel, batch), batch


def work_of(work, batch):
    tp = work.parallel.tensor_model_parallel_size
    return [forward_work(kind, used, batch, tp) for chunk in work.chunks for kind, used in layer_parameters(chunk)]


@pytest.mark.parametrize("shape", [GPT, LLAMA])
def test_six_operations_a_parameter_and_token(shape):
    """Forward and backward: 6 operations a parameter and token, but for look-ups, norms and biases; and scores:
    4 operations a token and layer for each of 64 positions and 256 columns, half of them behind the causal mask, and
    2.5 times as many backward."""
    work, batch = run_of(shape)
    matrices = shape.layers * sum(rows * sizes[0] for rows, *sizes in shape.layer(1).values() if sizes)
    matrices += shape.vocab * shape.hidden
    forward = work_of(work, batch)
    total = sum(flop(each) + flop(each.backward(Work())) for each in forward)
    assert total == pytest.approx(6 * matrices * 128 + 14 * 4 * 64 * 256 * 128 / 2)
    biases_and_ends = shape.numel - matrices
    assert biases_and_ends < 0.13 * shape.numel  # the look-up's matrix; the rule holds within it and the scores
    assert total == pytest.approx(6 * shape.numel * 128, rel=0.15)
    # By hand: three times the forward, four with every layer's forward run again.
    layer, used = forward[1], layer_parameters(work.chunks[0])[1][1]

    def again(recompute, *modules):
        how = batch._replace(recompute=recompute, recompute_modules=modules or ("core_attn",))
        return recomputed_work(layer, "transformer", used, how, 1, None)

    assert again("full") == layer and again(None) == Work()
    assert flop(layer.backward(Work())) == 2 * flop(layer) + 0.5 * layer.score_flop
    assert flop(layer.backward(layer)) == flop(layer.backward(Work())) + flop(layer)
    assert flop(again("selective")) == layer.score_flop
    # Modules: of the MLP its two matrices, of norms no products.
    mlp = flop(again("selective", "mlp"))
    assert mlp == 2 * 128 * (3 if shape.gated else 2) * 256 * shape.ffn
    assert flop(again("selective", "layernorm")) == 0 < again("selective", "layernorm").moved_bytes
    assert flop(again("selective", "core_attn", "mlp")) == layer.score_flop + mlp


def test_bytes_between_the_matrices_by_hand():
    """A layer of LayerNorms, GELU and residuals: per token in 16 bits, two norms of 2 x 256, queries, keys and values
    2 x 768, activation 1024 + 1024, twice bias, dropout and residual 3 x 256."""
    work, batch = run_of()
    layer = work_of(work, batch)[1]
    assert layer.moved_bytes == 2 * 128 * (2 * 2 * 256 + 2 * 768 + 2 * 1024 + 2 * 3 * 256)
    assert layer.score_bytes == 2 * 128 * 4 * 256 and layer.reduced_bytes == ()
    local = work_of(work, batch._replace(score_heads=8))[1]
    assert local.score_bytes == SCORE_PASSES * 2 * (2 * 8 * 64 * 64) and local.score_flop == 2 * layer.score_flop
    products = dict(zip(("proj", "qkv", "fc1", "fc2"), layer.products))
    assert products["fc1"] == (2 * 128 * 256 * 1024, 2 * (256 * 1024 + 128 * (256 + 1024)))


def test_a_fused_loss_passes_over_the_logits_less_often():
    """1024 logits of each of 128 tokens, 18, 10 and 4 bytes of each forward, twice that backward; the last norm before
    them 2 x 256 columns of 16 bits."""
    work, batch = run_of()
    for fusion, logit_bytes in ((None, 18), ("native", 10), ("te", 4)):
        output = work_of(work, batch._replace(loss_fusion=fusion))[-1]
        assert output.moved_bytes == 128 * (logit_bytes * 1024 + 2 * 2 * 256)
        assert output.backward(Work()).moved_bytes == 2 * output.moved_bytes


def test_tensor_parallel_ranks_share_the_work():
    whole, batch = run_of()
    half, _ = run_of(tp=2, dp=4)
    one, two = work_of(whole, batch)[1], work_of(half, batch)[1]
    assert flop(two) == flop(one) / 2 and two.reduced_bytes == (2 * 128 * 256,) * 2
    spread = work_of(half, batch._replace(sequence_parallel=True))[1]
    assert spread.moved_bytes == one.moved_bytes / 2 < two.moved_bytes


def test_context_parallel_ranks_share_the_tokens_and_attend_to_whole_sequences():
    """Each has half of the tokens, hence half of the operations, those of scores too; keys and values of both go round,
    256 columns each, and back with their gradients."""
    whole, batch = run_of()
    part = batch._replace(context_parallel=2)
    one, two = work_of(whole, batch)[1], work_of(whole, part)[1]
    assert part.tokens == batch.tokens / 2 and flop(two) == flop(one) / 2 and two.score_flop == one.score_flop / 2
    assert two.moved_bytes == one.moved_bytes / 2 and one.exchanged_bytes == 0
    ways = (part._replace(recompute=recompute) for recompute in (None, "selective", "full"))
    anew = (recomputed_work(two, None, [], batch, 1, None) for batch in ways)
    exchanged = [two.backward(again).exchanged_bytes for again in anew]
    assert two.exchanged_bytes == 2 * 128 * 2 * 256 and exchanged == [each * two.exchanged_bytes for each in (2, 3, 3)]
    assert work_of(gpt_workload(LLAMA, whole.parallel, part), part)[1].exchanged_bytes == 2 * 128 * 2 * 64
    # The longer of scores and exchange counts: over Ethernet the exchange, of 4 MiB through a rank's part of its card.
    sheet, (far, _), long = sheets.load("h100-ethernet"), run_of(dp=2, tp=8), MicroBatch(4096, 8, context_parallel=2)
    scores, exchange = (
        next(row.forward_us for row in estimate(sheet, far, each).compute if row.layer_kind == "transformer")
        for each in (long._replace(micro_batch_size=4, context_parallel=1), long)
    )
    line = SheetLinks(sheet, far.parallel).sequence_gather(2)
    assert (
        line == SheetLinks(sheet, far.parallel).gather(2)
        and 0 < line.at(1 << 22) - (exchange - scores) < 0.1 * exchange
    )


def test_a_gather_on_one_node_and_over_two():
    sheet = sheets.load("h100-rdma")
    one = SheetLinks(sheet, run_of()[0].parallel).gather(8)
    assert one.us_per_byte == pytest.approx(7 / 8 / (450e3 * 0.8)) and one.us == pytest.approx(8 + 7 * 0.8)
    # 16 ranks on two nodes: all but one rank's part enters a node by 8 cards of 50 GB/s, of which 85 % are reached.
    two = SheetLinks(sheet, run_of(dp=16)[0].parallel).gather(16)
    assert two.us_per_byte == pytest.approx(15 / 16 / (8 * 50e3 * 0.85))
    assert two.us == pytest.approx(8 + 14 * 0.8 + 6)
    # As published of two nodes joined by 50 GB/s: 54 GB/s.
    joined = SheetLinks(sheets.load("h100-400g"), run_of(dp=16)[0].parallel).gather(16)
    assert 15 / 16 / joined.us_per_byte / 1e3 == pytest.approx(54, rel=0.25)
    # Over Ethernet the network decides; with tensor parallelism of a whole node one card serves a group.
    slow = SheetLinks(sheets.load("h100-ethernet"), run_of(dp=2, tp=8)[0].parallel)
    assert slow.gather(2).us_per_byte == pytest.approx(1 / 2 / (1562.5 * 0.75))


def test_instances_of_the_optimizer_add_their_shards_up_over_the_network():
    sheet, (work, batch) = sheets.load("h100-rdma"), run_of(dp=16, instances=2)
    links = SheetLinks(sheet, work.parallel)
    one, both = links.gather(8), links.reduce(8)
    # Each of 8 ranks on a node has one counterpart, and half of its eighth goes each way through its own card, twice.
    assert one == SheetLinks(sheet, run_of()[0].parallel).gather(8)
    assert both.us_per_byte - one.us_per_byte == pytest.approx(2 * 1 / 2 / 8 / (50e3 * 0.85))
    assert both.us > one.us and SheetLinks(sheet, run_of()[0].parallel).reduce(8) == one
    table = estimate(sheet, work, batch)
    expected = both.scaled(4 / ITEM_BYTES["bfloat16"]).at(1 << 28)
    assert {point.size_bytes: point.p50_us for point in table.reduce.points}[1 << 28] == pytest.approx(expected)
    assert Timing(work, table).reduce_us(1 << 28) == pytest.approx(expected)


def test_gradients_and_states_of_16_bits_are_half_the_bytes():
    sheet, (work, batch) = sheets.load("h100-rdma"), run_of(dp=16)
    states = ("bfloat16", "bfloat16")
    narrow = replace(work, optimizer=OptimizerSettings(gradient_dtype="bfloat16", moment_dtypes=states))
    wide, thin = (Timing(each, estimate(sheet, each, batch)) for each in (work, narrow))
    assert thin.reduce_us(1 << 28) == pytest.approx(wide.reduce_us(1 << 27))
    assert [point.size_bytes for point in thin.reduces] == [2 * point.size_bytes for point in wide.reduces]
    # A fixed time aside: 28 bytes for AdamW, 16 around it and 6 to cast; then 18, 8 and 6.
    per_byte = [(each.optimizer_us(1 << 34) - each.optimizer_us(1 << 33)) / (1 << 33) for each in (wide, thin)]
    assert per_byte[1] / per_byte[0] == pytest.approx(32 / 50, rel=1e-3)


def experts_of(work, ep: int, number: int, topk: int, etp: int | None = None):
    """``work`` with a layer of kind ``moe``: its MLP is cut in ``number`` experts, of which a rank holds its part."""
    parallel = replace(work.parallel, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp)
    (chunk,) = work.chunks
    parameters = []
    for p in chunk.parameters:
        if ".1.mlp." not in p.name or len(p.shape) < 2:
            parameters.append(p)
            continue
        for local in range(number // ep):
            name = p.name.replace(".mlp.", f".mlp.experts.local_experts.{local}.")
            parameters.append(replace(p, name=name, expert=True))
    kinds = tuple("moe" if layer == 2 else kind for layer, kind in enumerate(chunk.layer_kinds))
    chunks = (replace(chunk, parameters=tuple(parameters), layer_kinds=kinds),)
    experts = workload.Experts(num_experts=number, router_topk=topk)
    return workload.check(replace(work, parallel=parallel, chunks=chunks, experts=experts))


def test_experts_compute_on_the_tokens_that_a_balanced_router_sends():
    dense, batch = run_of(dp=16)
    work = experts_of(dense, 4, 8, topk=2)
    share = experts_share(work)
    assert share == (2, 2)  # two copies of each token, a part of them in each of two experts
    layers = layer_parameters(work.chunks[0])
    one, moe = (forward_work(*layers[index], batch, 1, share) for index in (1, 2))
    mlp = 2 * 256 * 1024
    assert flop(moe) == flop(one) + 2 * 128 * mlp  # two experts a token, each as large as the MLP
    assert moe.routed == (2 * 2 * 128 * 256,) * 2 and moe.backward(moe).routed == moe.routed * 2
    with pytest.raises(InputError, match="experts: is missing"):
        forward_work(*layers[2], batch, 1)
    # An expert-tensor-parallel size of 1 beside tensor parallelism: each rank computes on its own half of the tokens.
    assert experts_share(experts_of(run_of(dp=8, tp=2)[0], 4, 8, topk=2, etp=1)) == (1, 2)


def test_tokens_travel_between_the_ranks_of_their_experts():
    sheet = sheets.load("h100-rdma")
    inside = SheetLinks(sheet, experts_of(run_of(dp=16)[0], 8, 8, topk=2).parallel).all_to_all()
    assert inside.us_per_byte == pytest.approx(7 / 8 / (450e3 * 0.8))
    across = SheetLinks(sheet, experts_of(run_of(dp=16)[0], 16, 16, topk=2).parallel).all_to_all()
    assert across.us_per_byte == pytest.approx(8 / 16 / (50e3 * 0.85))
    table = estimate(sheet, experts_of(run_of(dp=16)[0], 8, 8, topk=2), MicroBatch(64, 2))
    times = {row.layer_kind: row.forward_us for row in table.compute if row.layer_kind}
    # So small a layer takes as long as its kernels' launches; then the tokens go there and back.
    assert times["moe"] == pytest.approx(times["transformer"] + 2 * inside.at(2 * 2 * 128 * 256))


def test_experts_are_gathered_among_the_ranks_that_share_them():
    sheet, (work, batch) = sheets.load("h100-rdma"), run_of(dp=16)
    assert estimate(sheet, work, batch).experts is None
    experts = estimate(sheet, experts_of(work, 8, 8, topk=2), batch).experts
    assert experts is not None and experts.ranks == 2
    # Two ranks, each on a node of its own: half of the group comes through one card.
    points = {point.size_bytes: point.p50_us for point in experts.gpu.points}
    assert points[1 << 28] - points[1 << 24] == pytest.approx((2**28 - 2**24) / 2 / (50e3 * 0.85))


def test_collectives_measured_among_as_many_ranks_become_those_of_experts():
    sheet, (work, batch) = sheets.load("h100-rdma"), run_of(dp=16)
    dense, two = estimate(sheet, work, batch), estimate(sheet, run_of(dp=2, gpus_per_node=1)[0], batch)
    table = combine({"dense.json": dense, "two.json": two}, {"experts": "two.json"})
    assert table.experts is not None and table.experts.ranks == 2 and table.experts.gpu == two.routes.gpu
    moe = experts_of(work, 8, 8, topk=2)
    compute = estimate(sheet, moe, batch)
    table = combine(
        {"dense.json": dense, "two.json": two, "moe.json": compute}, {"experts": "two.json", "compute": "moe.json"}
    )
    assert evaluate(moe, table).iteration_time_us > 0
    with pytest.raises(InputError, match="experts: needs routes.gpu, reduce and a known data_parallel_size"):
        combine(
            {"dense.json": replace(dense, metadata=replace(dense.metadata, world_sizes=None))},
            {"experts": "dense.json"},
        )


def test_host_copies_share_links_and_host_memory():
    pcie = SheetLinks(sheets.load("h100-nvlink"), run_of()[0].parallel).host_copy()
    assert pcie.us_per_byte == pytest.approx(1 / (64e3 * 0.866))
    shared = SheetLinks(sheets.load("l40s"), run_of()[0].parallel).host_copy()
    assert shared.us_per_byte == pytest.approx(1.5 / (32e3 * 0.78))
    c2c = SheetLinks(sheets.load("gh200"), run_of(dp=2, gpus_per_node=1)[0].parallel).host_copy()
    assert c2c.us_per_byte == pytest.approx(1 / min(450e3 * 0.8, 400e3))


@pytest.mark.parametrize("name", sheets.names())
def test_every_machine_gives_a_table_that_simulates(name):
    sheet = sheets.load(name)
    work, batch = (
        run_of(pp=2, vp=2, dp=8, gpus_per_node=sheet.gpus_per_node) if sheet.network else run_of(dp=sheet.gpus_per_node)
    )
    table = estimate(sheet, work, batch, name=name)
    assert table.metadata.synthetic and "nothing here was measured" in table.metadata.notes[0]
    assert evaluate(work, table).iteration_time_us > 0
    of_host = (table.host_add, table.host_step, table.device_step, table.routes.nvme, table.publish.nvme)
    for curve in (table.routes.gpu, table.routes.cpu, table.publish.cpu, table.reduce, table.optimizer, *of_host):
        assert curve is not None and all(p.p95_us > 1.05 * p.p50_us for p in curve.points)
    assert all(row.forward_p95_us > 1.05 * row.forward_us for row in table.compute)
    estimate_of = Costs(table).estimate("routes.gpu", 10_000_000)
    assert estimate_of.high_us > 1.1 * estimate_of.us > 1.1 * estimate_of.low_us


def per_byte(curve: Curve) -> float:
    (small, small_us), (large, large_us) = ((p.size_bytes, p.p50_us) for p in curve.points[-2:])
    return (large_us - small_us) / (large - small)


def test_what_is_not_estimated_of_state_space_layers_is_said():
    work, batch = run_of()
    kinds = {"transformer": "mamba"}
    mixers = tuple(
        replace(chunk, layer_kinds=tuple(kinds.get(kind, kind) for kind in chunk.layer_kinds)) for chunk in work.chunks
    )
    sheet = sheets.load("h100-rdma")
    said, plain = (estimate(sheet, one, batch).metadata.notes for one in (replace(work, chunks=mixers), work))
    assert "not the scan" in said[-1] and said[:-1] == plain


def test_adam_of_pytorch_takes_what_was_measured_on_an_h200():
    """With its clipping, in the mean over the two largest sizes (gpu_first_runs.md's machine, 26 November 2026)."""
    work, batch = run_of(dp=1)
    costs = Costs(estimate(sheets.load("h200-one-gpu"), work, batch._replace(local=True)))
    for size, measured_us in ((1 << 28, 4146.7), (1 << 27, 2165.7)):
        assert costs.estimate("optimizer", size).us == pytest.approx(measured_us, rel=0.12)


def test_what_the_host_takes_by_hand():
    """H200 alone on a machine of 16 cores: these read and write 102.4 GB/s, of which Megatron's AdamW reaches 60 % and
    the run's 80 %; page-locked copies have 55.3 GB/s, others 12.2. A byte of a group is half a parameter."""
    sheet = sheets.load("h200-one-gpu")
    work, batch = run_of(dp=1)
    hosted = replace(work, optimizer=replace(work.optimizer, on_host=True))
    table, on_host = estimate(sheet, work, batch), estimate(sheet, hosted, batch)
    adam, joined, copy, pageable, device = 102.4e3 * 0.6, 102.4e3 * 0.8, 64e3 * 0.864, 64e3 * 0.19, 4.8e6 * 0.8
    assert per_byte(table.host_add) == pytest.approx(3 / 102.4e3)  # 12 bytes an element of 4
    assert per_byte(table.host_step) == pytest.approx((28 / adam + 4 / copy + 4 / pageable) / 2)
    ways = {name: per_byte(Curve(points=points)) for name, points in table.host_step.algorithms.items()}
    assert ways == pytest.approx({JOINED: 34 / joined / 2, CAST_ON_DEVICE: 28 / joined / 2})
    assert per_byte(table.device_step) == pytest.approx(34 / device / 2)
    assert per_byte(table.optimizer) == pytest.approx(50 / device / 2)
    local = estimate(sheet, work, batch._replace(local=True))
    assert per_byte(local.device_step) == pytest.approx((34 + 52) / device / 2)
    assert per_byte(local.optimizer) == pytest.approx((50 + 52 + 8) / device / 2)
    assert per_byte(estimate(sheet, hosted, batch._replace(local=True)).optimizer) == pytest.approx(
        per_byte(on_host.optimizer) + 8 / device / 2
    )
    assert per_byte(on_host.optimizer) == pytest.approx((16 / device + 28 / adam + 4 / copy + 4 / pageable) / 2)


def test_what_is_slowest_sets_the_time_of_the_run_s_step():
    """With many fast cores, host memory: 40 bytes with those that are copied; on a slow link the copies."""
    sheet = sheets.load("h200-one-gpu")
    many, fast = replace(sheet.host.cores, value=64), replace(sheet.host.joined_efficiency, value=0.9)
    hosts = replace(sheet, host=replace(sheet.host, cores=many, joined_efficiency=fast))
    narrow = replace(sheet, host_link=replace(sheet.host_link, gpus_per_link=sheet.host_link.gpus_per_link, pcie=None))
    narrow = replace(narrow, host_link=replace(narrow.host_link, bytes_per_s=replace(sheet.host.cores, value=4e9)))
    for each, host, device in ((hosts, 40 / 158e3, 36 / 158e3), (narrow, 4 / 4e3 / 0.864, 4 / 4e3 / 0.864)):
        ways = estimate(each, *run_of(dp=1)).host_step.algorithms
        found = {name: 2 * per_byte(Curve(points=points)) for name, points in ways.items()}
        assert found == pytest.approx({JOINED: host, CAST_ON_DEVICE: device})


def test_ranks_of_a_node_share_cores_and_memory():
    sheet = sheets.load("h100-nvlink")
    whole, half = (estimate(sheet, run_of(dp=dp)[0], run_of()[1]) for dp in (8, 1))
    assert per_byte(whole.host_add) == pytest.approx(3 * 8 / 500e3)
    assert per_byte(half.host_add) == pytest.approx(3 * 2 / 500e3)  # memory of one of two NUMA nodes
    few = replace(sheet, host=replace(sheet.host, cores=replace(sheet.host.cores, value=16)))
    assert per_byte(estimate(few, *run_of()).host_add) == pytest.approx(3 * 8 / 160e3)


def test_a_small_layer_takes_as_long_as_its_kernels_and_its_launches_are_the_thread_s():
    sheet = sheets.load("h200-one-gpu")
    table = estimate(sheet, *run_of(dp=1))
    row = {row.layer_kind: row for row in table.compute}["transformer"]
    assert (row.forward_us, row.backward_us) == (20 * sheet.device.kernel_us.value, 40 * sheet.device.kernel_us.value)
    assert row.forward_launch_us == row.backward_launch_us == sheet.host.layer_us.value
    assert table.launches is not None and table.launches.tensor_us == sheet.host.tensor_us.value
    again = run_of(dp=1, batch=MicroBatch(64, 2, recompute="full"))
    row = {row.layer_kind: row for row in estimate(sheet, *again).compute}["transformer"]
    assert row.backward_launch_us == 2 * sheet.host.layer_us.value


def test_measured_parts_replace_estimated_ones():
    work, batch = run_of()
    estimated = estimate(sheets.load("h100-nvlink"), work, batch)
    measured = estimated.__class__(
        schema_version=2,
        kind="cost_table",
        compute=(Compute(pp_rank=0, model_chunk_id=0, forward_us=5.0, backward_us=9.0),),
        p2p=Curve(points=(Point(size_bytes=1, p50_us=1.0),)),
    )
    both = combine({"measured.json": measured, "estimated.json": estimated})
    assert both.compute == measured.compute and both.routes == estimated.routes and both.metadata.synthetic
    assert both.metadata.source is not None and both.metadata.source.parts["routes.gpu"] == "estimated.json"


def test_what_does_not_fit_the_machine_is_refused():
    work, batch = run_of(dp=16, gpus_per_node=None)
    with pytest.raises(InputError, match="gpus_per_node = 16: the machine has 8 GPUs .*--gpus-per-node to describe"):
        estimate(sheets.load("h100-rdma"), work, batch)
    with pytest.raises(InputError, match="nodes = 2: one node, 8 x H100 SXM, NVLink has no network"):
        estimate(sheets.load("h100-nvlink"), run_of(dp=16)[0], batch)
    odd = run_of(GPT._replace(dtype="float64"))[0]
    with pytest.raises(InputError, match="dtype = 'float64': .* known: bfloat16, float16, float32"):
        estimate(sheets.load("h100-nvlink"), odd, batch)


@pytest.mark.parametrize("pp", [1, 2])
def test_a_batch_that_the_model_was_not_described_with_is_refused(pp):
    parallel = sized(pp=pp, vp=1, dp=1, microbatches=2, order="1f1b" if pp > 1 else "no_pipeline")
    work = gpt_workload(GptShape(4, 64, 256, 4, 4, 384, 16), parallel, MicroBatch(128, 2))
    refuse_batch(work, MicroBatch(128, 2))
    refuse_batch(replace(work, p2p_bytes=0), MicroBatch(128, 3))  # does not say
    for batch in (MicroBatch(128, 3), MicroBatch(96, 2), MicroBatch(128, 2, context_parallel=4)):
        with pytest.raises(InputError, match="w.json: p2p_bytes = 32768: an activation of .* as for describe"):
            refuse_batch(work, batch, file="w.json")
