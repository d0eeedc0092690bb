"""The search: brute force on small cases, what is fixed stays, H200 by its bytes, the same answer each time."""

from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest

from megatron_ext.cost import hardware_sheet
from megatron_ext.formats.errors import InputError
from megatron_ext.planner import plan, policies
from megatron_ext.planner.effort import EFFORT
from megatron_ext.planner.fit import fit_verdict, search_settings
from megatron_ext.planner.fit.estimate_setting import floor_bytes, least_bytes, quick_choice, stock_of
from megatron_ext.planner.fit.fit_text import as_json, as_text
from megatron_ext.planner.fit.fit_verdict import fastest_without, verdict_of_fit
from megatron_ext.planner.fit.found import judge
from megatron_ext.planner.fit.request import Request, fit_problem_of, with_changes
from megatron_ext.planner.fit.search_settings import NEAR
from megatron_ext.planner.fit.setting import COUNT_ENDS
from megatron_ext.planner.fit.space import NAMES, Space
from megatron_ext.planner.quick_plan import FewRounds
from megatron_ext.planner.verdict import HELPS, HELPS_NOT
from megatron_ext.schedule.match import match
from megatron_ext.schedule.memory_bill import memory_bill
from megatron_ext.schedule.validate import validate
from megatron_ext.workload.workload import Limits

SMALL = """--num-layers 3 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --vocab-size 1024 --bf16
    --untie-embeddings-and-output-weights --micro-batch-size 2 --global-batch-size 16""".split()
H200 = """--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --micro-batch-size 4
    --global-batch-size 16 --untie-embeddings-and-output-weights --bf16 --transformer-impl transformer_engine""".split()
EXPERTS = """--num-experts 4 --expert-model-parallel-size 2 --moe-layer-freq [0,1]*2 --moe-ffn-hidden-size 256
    --moe-shared-expert-intermediate-size 256 --swiglu --disable-bias-linear""".split()


def request(words, **more) -> Request:
    return Request(**{"hardware": "l40s", "words": tuple(words), **more})


@pytest.mark.parametrize("experts", [[], EXPERTS])
def test_what_is_fixed_stays_and_all_train_the_same_batch(experts):
    given = fit_problem_of(request([*SMALL, "--num-layers", "4", *experts], search_layout=True)).space
    found = given.settings()
    assert found[0] == given.given and len(set(found)) == len(found) > 300
    assert {one.samples for one in found} == {16} and {one.parallel.world_size for one in found} == {8}
    assert not any(one.optimizer.delayed for one in found)
    for name in set(NAMES[: None if experts else -2]) - {"delayed-parameter-update", "recompute"}:
        kept = given._replace(fixed=frozenset([name])).settings()
        assert {one.options().get(f"--{name}") for one in kept} == {given.given.options().get(f"--{name}")}, name
        assert set(kept) < set(found), name
    assert {one.batch.recompute for one in given._replace(fixed=frozenset(["recompute"])).settings()} == {None}
    delayed = [one for one in given._replace(delayed=True).settings() if one.optimizer.delayed]
    assert delayed and all(one.optimizer.on_host for one in delayed)
    # Several layers recomputed together: no schedule may act between them, so not at zero stage 3.
    together = [one for one in found if one.batch.recompute_method == "uniform" and one.batch.recompute_num_layers > 1]
    assert {one.zero_stage for one in together} <= {1, 2}


def tried_first(monkeypatch, number: int, bound, slower, **more) -> list:
    """The first settings that a search estimates. ``bound(setting)`` is their lower bound, which their times exceed by
    the factor ``slower(setting)``."""
    tried = []

    def noted(setting, work, table, bound_us, **how):
        tried.append(setting)
        if len(tried) == number:
            raise InterruptedError
        return SimpleNamespace(us=bound_us * slower(setting), device_bytes=0, host_bytes=0)

    monkeypatch.setattr(search_settings, "bound_us", lambda work, timing: bound(work))
    monkeypatch.setattr(search_settings, "quick_choice", noted)
    with pytest.raises(InterruptedError):
        fit_problem_of(request([*SMALL, "--num-layers", "4"], **more)).search()
    return tried


def test_settings_wait_that_are_cut_like_a_slow_one(monkeypatch):
    """Settings without pipelines have the lowest bound here, and take three times as long."""
    fixed = ("optimizer-cpu-offload", "zero-stage", "micro-batch-size")
    slower = lambda setting: 3 if setting.parallel.pp == 1 else 1.5
    how = dict(search_layout=True, fixed=fixed)
    found = tried_first(monkeypatch, 40, lambda work: 100.0 + work.parallel.pp, slower, **how)
    tried = [(one.parallel.pp, one.parallel.tensor_model_parallel_size, one.zero_stage) for one in found]
    cuts = len(set(tried))
    assert cuts == len(set(tried[:cuts])) and {pp for pp, *_ in tried[:cuts]} == {1, 2, 4}
    assert all(pp > 1 for pp, *_ in tried[cuts:])


def test_a_large_micro_batch_does_not_wait_because_a_small_one_is_slow(monkeypatch):
    """With few micro-batches the bound is higher, and fewer gathers exceed it."""
    size = lambda setting: setting.batch.micro_batch_size
    bound, slower = lambda work: 1e3 - work.parallel.num_microbatches, lambda setting: 1 + 2 / size(setting)
    found = tried_first(monkeypatch, 3, bound, slower, fixed=("optimizer-cpu-offload", "zero-stage"))
    assert [*map(size, found[1:])] == [1, 2]  # after the given setting


def test_every_layout_keeps_what_no_setting_names():
    """Options of the launch line that no setting names stay in it, so they hold for every setting."""
    kept = ["--global-batch-size", "64", "--num-distributed-optimizer-instances", "2"]
    kept += ["--microbatch-group-size-per-virtual-pipeline-stage", "4"]
    layout = ["--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"]
    space = fit_problem_of(request([*SMALL, "--num-layers", "4", *kept, *layout], search_layout=True)).space
    sizes = {one.parallel for one in space.settings()}
    assert {each.pp for each in sizes} == {1, 2, 4} and {each.instances for each in sizes} == {2}
    assert {each.microbatch_group_size for each in sizes if each.vp > 1} == {4}


@pytest.mark.parametrize("of_their_own", [[], ["--expert-tensor-parallel-size", "1"]])
def test_experts_are_spread_as_given_or_within_a_node(of_their_own):
    words = [*SMALL, "--num-layers", "4", *EXPERTS, *of_their_own]
    assert {one.parallel.ep for one in fit_problem_of(request(words)).space.settings()} == {2}
    space = fit_problem_of(request(words, hardware="h100-rdma", nodes=2, search_layout=True)).space
    found = {(one.parallel, one.batch.recompute): one for one in space.settings() if one.zero_stage == 1}
    assert {parallel.ep for parallel, _ in found} == {1, 2, 4}
    for (parallel, _), one in found.items():
        work, tp = one.workload(Limits()), parallel.tensor_model_parallel_size
        assert one.batch.sequence_parallel == (tp > 1)  # Megatron refuses experts without
        assert parallel.etp == (1 if of_their_own else tp) and (parallel.ep == 2 or parallel.ep * parallel.etp <= 8)
        experts = sum(p.numel for chunk in work.chunks for p in chunk.parameters if ".experts." in p.name)
        assert experts * parallel.ep * parallel.etp == 2 * 4 * 3 * 512 * 256
        assert 0 < floor_bytes(one) <= least_bytes(work)


def test_gradients_are_sharded_with_sequence_parallelism():
    words = [*SMALL, "--sequence-parallel", "--tensor-model-parallel-size", "2"]
    found = fit_problem_of(request(words, search_layout=True)).space.settings()
    several = [one for one in found if one.parallel.tensor_model_parallel_size > 1]
    assert {one.zero_stage for one in several} == {1, 2, 3} and all(one.batch.sequence_parallel for one in several)
    assert not any(one.workload(Limits()).keeps_gradients for one in several)


def test_what_only_a_whole_plan_fits_is_found_as_plan_finds_it(monkeypatch):
    monkeypatch.setattr(search_settings, "PLAN_EFFORT", 1.0)  # less than this plan, as with many layers
    words = """--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --vocab-size 50257 --bf16
        --micro-batch-size 8 --global-batch-size 1024 --zero-stage 3 --recompute-granularity full --recompute-method
        uniform --recompute-num-layers 1 --limit-device-bytes 2289114503""".split()
    problem = fit_problem_of(request(words, hardware="h100-ethernet", world_size=8, fixed=("all",)))
    given, work = problem.space.given, problem.space.given.workload(problem.limits)
    with pytest.raises(InputError, match="cannot fit"):
        quick_choice(given, work, problem.costs.of(given, work), 0.0)
    assert problem.search().winner.us == plan(work, problem.costs.of(given, work)).predicted.iteration_time_us


def test_a_single_setting_takes_what_plan_finds_whatever_it_costs(monkeypatch):
    """Its quick plans took up to 42 % longer, from 35 layers on at zero stage 3."""
    monkeypatch.setattr(search_settings, "PLAN_EFFORT", 0.0)
    words = """--num-layers 12 --hidden-size 1024 --num-attention-heads 8 --seq-length 1024 --vocab-size 32000 --bf16
        --micro-batch-size 1 --global-batch-size 1 --zero-stage 3 --optimizer-cpu-offload""".split()
    (found,) = fit_problem_of(request(words, hardware="rtx4090", world_size=1, fixed=("all",))).search().tried
    assert found.planned


@pytest.mark.nightly
def test_stock_megatron_is_searched_with_sequence_parallelism(monkeypatch):
    """A plan was said to help to fit, where stock Megatron fits by other parallel sizes."""
    monkeypatch.setattr(search_settings, "PLAN_EFFORT", 0.0)
    monkeypatch.setattr(search_settings, "PARTS", (1.0, 1.0))
    words = [*SMALL, *"--num-layers 2 --hidden-size 8192 --num-attention-heads 64 --seq-length 8192".split()]
    words += "--micro-batch-size 1 --hidden-dropout 0 --limit-device-bytes 10000000000".split()
    fixed = ("micro-batch-size", "pipeline-model-parallel-size", "recompute")
    asked = request(words, hardware="h100-nvlink", search_layout=True, fixed=fixed)
    problem = fit_problem_of(asked)
    found, fits = judge(asked, problem, problem.search()), {}
    for setting in problem.space.settings():
        rounds = FewRounds(setting.workload(problem.limits))
        if setting.zero_stage == 1:
            stock = stock_of(rounds, rounds.timings(problem.costs.of(setting, rounds.parts[0][0])))
            fits |= {setting: stock.us} if stock.device_bytes <= 10000000000 else {}
    best, without = min(fits, key=lambda setting: fits[setting]), fastest_without(found)
    assert without is not None and without.stock.us == fits[best] > found.fit.winner.us
    assert not found.fit.stock_left_out and best not in [one.setting for one in found.fit.tried]
    assert found.launch_of(best)[0].items() >= {"--sequence-parallel": "", "--tensor-model-parallel-size": "4"}.items()


def test_a_plan_of_stock_megatrons_fastest_setting_is_tried_whatever_the_search_leaves_out(monkeypatch):
    """Or a plan of slower settings is compared with it, and found to gain nothing."""
    for name, value in {"PARTS": (), "SMALL_LAYERS": 0}.items():
        monkeypatch.setattr(search_settings, name, value)
    words = [*SMALL, "--num-layers", "4"]
    fit = fit_problem_of(request(words, search_layout=True, fixed=("recompute", "micro-batch-size"))).search()
    setting, stock = min(fit.stock, key=lambda each: each[1].us)
    assert setting != fit.given.setting
    tried = {choice.setting: choice for choice in fit.tried}
    assert tried[setting].us <= stock.us and fit.winner.us <= stock.us


def test_stages_that_count_embedding_and_loss_as_layers():
    """6 layers in 4 stages: 1 in the first and the last, 2 between, as Megatron itself divides them."""
    uneven = "--num-layers 6 --decoder-first-pipeline-num-layers 2 --pipeline-model-parallel-size 2".split()
    asked = request([*SMALL, *uneven], fixed=("all",))
    found = judge(asked, fit_problem_of(asked), fit_problem_of(asked).search())
    space = found.problem.space._replace(fixed=frozenset(), layout=True)
    chosen, one_stage = (next(one for one in space.settings() if one.parallel.pp == pp) for pp in (4, 1))
    assert space.given.shape.stage_layers == (2, 4) and one_stage.shape.stage_layers == (6,)
    assert chosen.shape.stage_layers == (1, 2, 2, 1) and not one_stage.options().keys() & {*COUNT_ENDS}
    add, take_out = found.launch_of(chosen)
    assert take_out == ["--decoder-first-pipeline-num-layers"] == found.launch_of(one_stage)[1]
    words = with_changes(asked.words, add, take_out)
    assert fit_problem_of(request(words)).space.given.shape.stage_layers == chosen.shape.stage_layers


def test_ranks_that_share_sequences_are_kept():
    words = [*SMALL, "--num-layers", "4", "--context-parallel-size", "2"]
    found = fit_problem_of(request(words, search_layout=True)).space.settings()
    assert {one.samples for one in found} == {16} and {one.parallel.world_size for one in found} == {8}
    assert {one.options()["--context-parallel-size"] for one in found} == {"2"}
    given = fit_problem_of(request(SMALL)).space.given, found[0]
    assert [int(one.options()["--data-parallel-size"]) for one in given] == [8, 4]
    # Half of the tokens on each of as many ranks that share parameters.
    alone, shared = (one.workload(Limits()).chunks[0].activation_bytes[1] for one in given)
    assert 2 * shared == alone and given[0].parallel.data_parallel_size == given[1].parallel.data_parallel_size


@pytest.mark.parametrize(
    ("size", "why"), [("0", "must be at least 1"), ("3", "times 2 must divide"), ("16", "a multiple of .* context 16")]
)
def test_ranks_that_cannot_share_sequences(size, why):
    with pytest.raises(InputError, match=why):
        fit_problem_of(request([*SMALL, "--context-parallel-size", size]))


def test_brute_force(monkeypatch):
    """Every setting planned in full: the choice is within 1 % of the best (more cases: benchmarks/fit_truth.py)."""
    for stage, effort in EFFORT.items():  # of the planner, for the choice and for all settings alike
        monkeypatch.setitem(EFFORT, stage, effort // 40)
    monkeypatch.setattr(policies, "is_tiny", lambda workload: False)
    words = [*SMALL, "--num-layers", "2"]
    asked = request(words, hardware="h200-one-gpu", fixed=("micro-batch-size", "recompute"))
    stock = fit_problem_of(asked)
    work = stock.space.given.workload(Limits())
    limit = int(0.5 * max(bill.memory.device_total_bytes for bill in memory_bill(plan_of_stock(work), work)))
    problem = stock._replace(limits=Limits(device_bytes=limit, host_bytes=1 << 33))
    found = problem.search()
    best = min(us for setting in problem.space.settings() if (us := planned_us(problem, setting, limit)) is not None)
    for choice in found.tried:  # quick plans, too, are such that a run would take
        match(validate(choice.schedules[-1]), choice.rounds.parts[-1][0])
    assert found.winner.us <= best * 1.01 and found.winner.device_bytes <= limit
    assert found.bound_us <= best * (1 + 1e-9) and found.winner.bound_us <= found.winner.us * (1 + 1e-9)


def plan_of_stock(work):
    from megatron_ext.planner.stock import stock_schedule

    return stock_schedule(work)


def planned_us(problem, setting, limit: int) -> float | None:
    from megatron_ext.formats.errors import InputError

    work = setting.workload(problem.limits)
    try:
        made = plan(work, problem.costs.of(setting, work)).predicted
    except InputError:
        assert least_bytes(work) > 0
        return None
    assert made is not None
    # The bounds by which settings are pruned are none that a plan goes below.
    held = max(memory.device_total_bytes for memory in made.memory)
    assert floor_bytes(setting) <= least_bytes(work) <= held <= limit
    return made.iteration_time_us


@pytest.mark.nightly
def test_on_the_h200_recompute_with_whole_gradients_beats_everything_on_the_host():
    """The case of a first GPU run, within the bytes that everything on the host took there: 12.1 GB."""
    words = [*H200, *"--limit-device-bytes 12100000000 --hidden-dropout 0".split()]
    asked = request(words, hardware="h200-one-gpu", fixed=("micro-batch-size", "num-virtual-stages-per-pipeline-rank"))
    problem = fit_problem_of(asked)
    found = judge(asked, problem, problem.search())
    said = verdict_of_fit(found)
    text, figures = as_text(found, said), as_json(found, said)
    winner, row = found.fit.winner, figures["frontier"][0]
    assert row["way"].startswith("recompute, whole gradients on the device, ")
    assert f"{row['way']} beats everything on the host" in text
    assert all(f" {'' if one.planned else '~'}{one.us / 1e3:.0f} " in text for one in found.fit.frontier)
    # It is known to be the fastest only by what a quick plan leaves out, and a closer one knows.
    work = winner.setting.workload(found.limits)
    estimate = partial(quick_choice, winner.setting, work, problem.costs.of(winner.setting, work), 0.0)
    assert winner.planned and winner.us == min(one.us for one in found.fit.tried)
    assert estimate().us > 1.1 * winner.us and estimate(closely=True).us < (1 + NEAR) * winner.us
    ways = figures["ways"]
    assert ways["no recompute, gradients in host memory, shards in host memory, optimizer on the host"] > 1.1 * min(
        ways.values()
    )


@pytest.mark.parametrize(
    "given",
    ["--recompute-granularity=full --recompute-method uniform --recompute-num-layers 1", "--recompute-activations"],
)
def test_a_launch_line_takes_out_what_is_there_and_not_chosen(given):
    words = [*SMALL, *given.split()]
    asked = request([*words, "--use-distributed-optimizer"], fixed=("zero-stage", "optimizer-cpu-offload"))
    problem = fit_problem_of(asked)
    found = judge(asked, problem, problem.search())
    add, out = found.launch_of(found.fit.winner.setting)
    assert set(out) == {word.partition("=")[0] for word in given.split() if word.startswith("--")}
    assert "--overlap-param-gather" in add and "--use-distributed-optimizer" not in add
    assert "--overlap-grad-reduce" in add  # without which Megatron refuses the other
    assert not any(word.startswith("--recompute") for word in found.words())
    again = fit_problem_of(asked)
    repeated = judge(asked, again, again.search())
    assert as_json(repeated, verdict_of_fit(repeated)) == as_json(found, verdict_of_fit(found))
    # What the arguments of the script then say is the winner.
    assert fit_problem_of(request(found.words())).space.given == found.fit.winner.setting


def test_a_measured_table_corrects_the_sheet():
    """Layers that take two and three times as long as the sheet says: the next search knows it."""
    from msgspec.structs import replace

    from megatron_ext.cost.scaled_table import Factors, scaled
    from megatron_ext.report.fit_again import again

    words = [*H200, "--num-layers", "2", "--limit-device-bytes", "6000000000"]
    asked = request(words, hardware="h200-one-gpu", fixed=("micro-batch-size", "zero-stage"))
    problem = fit_problem_of(asked)
    winner = problem.search().winner
    asked = replace(asked, chosen=winner.setting.options(), predicted_us=winner.us)
    work = winner.setting.workload(problem.limits)
    table = problem.costs.of(winner.setting, work)
    same = again(asked, table)
    assert not same.better and same.chosen_us == pytest.approx(winner.us, rel=0.01)
    slower = again(asked, scaled(table, Factors({}, 2.0, 3.0, 1.5)))
    assert slower.found.problem.costs.measured == winner.setting
    (factors,) = slower.found.problem.costs.factors.values()
    assert factors[1:] == (pytest.approx(2.0), pytest.approx(3.0), pytest.approx(1.5))
    assert slower.chosen_us is None or slower.chosen_us > 1.3 * winner.us


def test_vocabulary_is_padded_for_the_tensor_parallel_size():
    words = [*SMALL, "--vocab-size", "1000"]
    space = fit_problem_of(request(words, search_layout=True)).space
    assert isinstance(space, Space)
    for one in space.settings():
        assert one.shape.vocab % (128 * one.parallel.tensor_model_parallel_size) == 0 and one.shape.vocab >= 1000


def test_every_machine_has_room_beside_the_reserve():
    for name, (tp, dp) in product(hardware_sheet.names(), [(1, 1)]):
        sheet = hardware_sheet.load(name)
        problem = fit_problem_of(request(SMALL, hardware=name))
        room = problem.room(problem.space.given, problem.space.given.workload(Limits()))
        assert 0.85 * sheet.device.memory_bytes.value < room < sheet.device.memory_bytes.value, (tp, dp)


def test_ranks_that_share_sequences_need_room_for_their_communicator():
    problem = fit_problem_of(request(SMALL, hardware="h100-nvlink"))
    one, work = problem.space.given, problem.space.given.workload(Limits())
    two = one._replace(batch=one.batch._replace(context_parallel=2))
    assert problem.room(one, work) - problem.room(two, work) == 32 * (10 << 20)


def test_where_host_memory_is_short_the_refusal_says_how_much_would_do(monkeypatch):
    words = [*SMALL, "--num-layers", "2", "--limit-device-bytes", str(120 << 20), "--limit-host-bytes"]
    fixed = ("micro-batch-size", "zero-stage")
    with pytest.raises(InputError, match=r"--limit-host-bytes = 20000000: nothing fits: .* takes \d+ bytes") as error:
        fit_problem_of(request([*words, "20000000"], hardware="h200-one-gpu", fixed=fixed)).search()
    enough = str(error.value).partition(" takes ")[2].split()[0]
    asked = request([*words, enough], hardware="h200-one-gpu", fixed=fixed)
    problem = fit_problem_of(asked)
    found = judge(asked, problem, problem.search())
    # Where no settings train without a plan it helps to fit, whatever it gains over what does not fit.
    nothing = SimpleNamespace(figures={"answer": HELPS_NOT}, conclusion="does not help")
    monkeypatch.setattr(fit_verdict, "verdict_of_choice", lambda *given: nothing)
    said = verdict_of_fit(found)
    assert fastest_without(found) is None and (said.answer, said.conclusion[:13]) == (HELPS, "helps to fit.")
    assert "--user-defined-schedule-nvme-path DIRECTORY" in said.lines(found, "schedule.json")[2]


def test_no_states_rest_on_a_drive_that_the_machine_does_not_have(tmp_path):
    """They would seem to cost nothing there."""
    (tmp_path / "no_drive.json").write_text('{"title": "no drive", "extends": "h200-one-gpu", "drive": null}')
    words = [*SMALL, "--num-layers", "2", "--limit-device-bytes", str(120 << 20), "--limit-host-bytes", "70000000"]
    fixed = ("micro-batch-size", "zero-stage")
    assert fit_problem_of(request(words, hardware="h200-one-gpu", fixed=fixed)).search().winner.drive_bytes > 0
    own = fit_problem_of(request(words, hardware=str(tmp_path / "no_drive.json"), fixed=fixed))
    with pytest.raises(InputError, match=r"--limit-host-bytes = 70000000: nothing fits: .* takes \d+ bytes") as error:
        own.search()
    enough = str(error.value).partition(" takes ")[2].split()[0]
    own = fit_problem_of(request([*words[:-1], enough], hardware=str(tmp_path / "no_drive.json"), fixed=fixed))
    assert own.search().winner.drive_bytes == 0
