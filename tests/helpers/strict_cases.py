"""Drawn cases for the strict stand-in of a device: two replicas of a small model, trained with everything around it.

Every tenth case is aimed at orderings that drawn cases rarely need, see :data:`AIMS`. In every eleventh the device has
one hardware queue. In every fiftieth two replicas are pipelines of two ranks.
"""

import itertools
import random
from pathlib import Path

from cases import MODELS, STRICT
from draw_schedule import (
    GRADIENTS,
    draw_schedule,
    never_whole,
    prepared,
    states_on_device,
    states_on_drive,
    with_gradients,
    with_step_slots,
)
from msgspec.structs import replace
from strict_engine import ONE_QUEUE

from megatron_ext.planner.reroute import rerouted, with_host_shards
from megatron_ext.runtime.node_exchange import IN_FLIGHT
from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.schedule import validate
from megatron_ext.schedule.user_defined_schedule import PublishGroup, Schedule
from megatron_ext.workload.optimizer_settings import OptimizerSettings
from megatron_ext.workload.route import HIERARCHICAL, SHARD_GATHER, kind_of
from megatron_ext.workload.workload import Limits

NAMES = ("bf16-tied", "fp16", "fp32")
ROUTES = (("gpu", "cpu", "nvme"), ("cpu",), ("gpu", "cpu"), ("nvme",), ("cpu", "nvme"))
ORDERS = ("late", "early", "drawn")
FOUR = "no_pipeline"
"""Layout of the cases in which nodes have several ranks: four replicas."""

PIPELINE, PIPELINE_EVERY = "1f1b", 50
"""Layout of the cases with a pipeline, and how many cases there are to one of them."""

EVERY = 10
"""Of so many cases one is aimed."""


def strict_case(seed: int, workloads, folder: Path, zero_stage: int | None = None) -> dict:
    """Case ``seed`` for ``ParityService.run``: model, zero stage, schedule, nodes, order of the streams, whether
    streams or threads wait for flags, slow threads, evaluation, checkpoints, whether parameters are changed between two
    iterations (``params_changed``), whether groups are published that nobody reads. Models in fp16 skip first steps.
    ``drawn`` says what was drawn, ``layout`` which ranks train."""
    aim = aim_of(seed)
    if aim is not None:
        zero_stage = zero_stage or (3, 1)[turn_of(seed) % 2]
        return AIMS[aim](random.Random(seed), workloads, folder / f"{seed}.json", seed, zero_stage)
    if seed % PIPELINE_EVERY == PIPELINE_EVERY // 2:
        return pipeline_case(random.Random(seed), workloads, folder / f"{seed}.json", seed, zero_stage)
    draw = random.Random(seed)
    name, order, routes = NAMES[seed % 3], draw.choice(ORDERS), ROUTES[seed % len(ROUTES)]
    order = ONE_QUEUE if seed % (EVERY + 1) == EVERY else order
    zero_stage = zero_stage or draw.choice((3, 1, 3, 2))
    workload, nodes = workloads[STRICT, name], draw.choice((2, 2, 1))
    workload = replace(
        workload,
        zero_stage=zero_stage,
        limits=Limits(nvme_slots=2),
        parallel=replace(workload.parallel, gpus_per_node=nodes),
    )
    path = folder / f"{seed}.json"
    schedule = prepared(draw, workload, path, routes)
    options = [*MODELS[name], "--gpus-per-node", str(nodes), "--user-defined-schedule-nvme-path", str(folder)]
    options += between_iterations(draw, path)
    changed = draw.random() < 0.5
    unread = draw.random() < 0.3 and publish_unread(draw, schedule, path)
    drawn = [f"{name}, zero stage {zero_stage}", " ".join(routes), order, f"{nodes} ranks a node"]
    drawn += [word for word in ("--eval-iters", "--save") if word in options]
    drawn += slow_threads(seed)
    drawn += sorted({f"gradients {group.gradients}" for group in schedule.groups})
    last = behind_a_copy(schedule)
    hosted = any(group.shard_rests for group in schedule.groups)
    if changed:  # what parameters are changed beside, in one word
        how = ("behind a copy" if last else "", "shards on the host" if hosted else "", nodes)
        drawn += ["params_changed", f"params_changed {how}"]
    return {
        "layout": STRICT,
        "drawn": drawn + (["published, unread"] if unread else []),
        "meddle": "told" if changed else None,
        "options": options,
        "schedule": path,
        "iterations": 4 if name == "fp16" else 3,
        "strict": {"seed": seed, "order": order, **slow_threads(seed)},
    }


def pipeline_case(draw, workloads, path: Path, seed: int, zero_stage: int | None = None) -> dict:
    """Activations and their gradients pass between the ranks of a pipeline as messages."""
    name, zero_stage, nodes = (
        draw.choice(("bf16-tied", "fp32")),
        zero_stage or draw.choice((3, 1, 2)),
        draw.choice((4, 2)),
    )
    workload = _sized(workloads, PIPELINE, name, zero_stage, nodes)
    prepared(draw, workload, path, draw.choice(ROUTES))
    options = ["--gpus-per-node", str(nodes), *between_iterations(draw, path)]
    how = dict(options=options, drawn=[f"pipeline, zero stage {zero_stage}"], layout=PIPELINE)
    return _case(draw, seed, path, name, **how)


def between_iterations(draw, path: Path, evaluations: float = 0.5) -> list[str]:
    """Options by which evaluations and checkpoints come between iterations, or do not."""
    options = []
    if draw.random() < evaluations:
        options += ["--eval-interval", "2", "--eval-iters", "1"]
    if draw.random() < 0.5:
        options += ["--save", str(path.with_suffix(".checkpoints")), "--save-interval", "2"]
    return options


def further(seed: int) -> random.Random:
    """For what is drawn of a case besides its schedule: draws that depend on none of the others."""
    return random.Random(f"further {seed}")


def turn_of(seed: int) -> int:
    """How many cases of the same aim come before; those of even turns are at zero stage 3."""
    return seed // EVERY // len(AIMS)


def slow_threads(seed: int) -> dict[str, float]:
    """In two of five cases threads come late, now and then by several layers."""
    return {"thread_seconds": 0.4} if seed % 5 > 2 else {}


def behind_a_copy(schedule: Schedule) -> bool:
    """Whether a copy from the host is under way between two iterations, and no all-gather behind it orders it."""
    start, last = schedule.ranks[0].start.unshard, len(schedule.groups) - 1
    return any(item.group == last and item.route in ("cpu", "nvme") for item in start)


def _case(draw, seed: int, path: Path, name: str, **more) -> dict:
    """A case of model ``name`` with the schedule in ``path``."""
    order, slow = draw.choice(ORDERS), more.pop("slow", None) or slow_threads(seed)
    options = [*MODELS[name], "--user-defined-schedule-nvme-path", str(path.parent), *more.pop("options", ())]
    return {
        "layout": STRICT,
        "options": options,
        "schedule": path,
        "iterations": more.pop("iterations", 3),
        "strict": {"seed": seed, "order": order, **slow},
        **more,
        "drawn": [*more.get("drawn", ()), name, order, *slow],
    }


def _sized(workloads, layout: str, name: str, zero_stage: int, nodes: int):
    workload = workloads[layout, name]
    parallel = replace(workload.parallel, gpus_per_node=nodes)
    return replace(workload, zero_stage=zero_stage, limits=Limits(nvme_slots=2), parallel=parallel)


def _changed_behind_a_copy(draw, workloads, path: Path, seed: int, zero_stage: int) -> dict:
    name = draw.choice(("bf16-tied", "fp32"))
    workload = _sized(workloads, STRICT, name, zero_stage, 2)
    for number in itertools.count(seed):
        schedule = prepared(random.Random(number), workload, path, ("cpu",), gradients=(None,))
        if behind_a_copy(schedule) and not any(group.shard_rests for group in schedule.groups):
            break
    how = dict(options=["--gpus-per-node", "2"], drawn=[f"changed behind a copy, zero stage {zero_stage}"])
    return _case(draw, seed, path, name, meddle="told twice", **how)


def _unread_on_another_node(draw, workloads, path: Path, seed: int, zero_stage: int) -> dict:
    """What nobody reads is sent to another node until the next publishing."""
    workload = _sized(workloads, STRICT, "fp32", zero_stage, 1)
    for number in itertools.count(seed):
        drawn = random.Random(number)
        schedule = prepared(drawn, workload, path, ("gpu", "cpu"), gradients=(None,))
        if publish_unread(drawn, schedule, path):
            break
    how = dict(options=["--gpus-per-node", "1"], drawn=["unread, on another node"])
    return _case(draw, seed, path, "fp32", **how)


def _through_the_drive(nodes: int):
    def case(draw, workloads, path: Path, seed: int, zero_stage: int) -> dict:
        """More groups have a copy on the drive alone, read by nobody, than buffers through which they get there."""
        workload = _sized(workloads, STRICT, "fp32", zero_stage, nodes)
        for number in itertools.count(seed):
            schedule = prepared(random.Random(number), workload, path, ("gpu",), gradients=(None,))
            if len(schedule.groups) > 2 * IN_FLIGHT and not any(group.shard_rests for group in schedule.groups):
                break
        _publish(schedule, dict.fromkeys(range(len(schedule.groups)), ("nvme",)), path)
        how = dict(options=["--gpus-per-node", str(nodes)], drawn=[f"through the drive, {nodes} ranks a node"])
        return _case(draw, seed, path, "fp32", **how)

    return case


def _beside_the_backward(overflow: bool):
    def case(draw, workloads, path: Path, seed: int, zero_stage: int) -> dict:
        name, more = "fp16" if overflow else "bf16-offload", further(seed)
        workload = _sized(workloads, STRICT, name, zero_stage, 2)
        workload, drawn = replace(workload, optimizer=OptimizerSettings(on_host=True)), []
        kinds = (None, "sharded") if overflow else GRADIENTS  # in fp16 nobody unscales those on the host
        routes = more.choice((("gpu", "cpu"), ("gpu",)))
        while True:
            schedule = _some_shards_on_host(more, draw_schedule(draw, workload, routes), workload)
            schedule = with_gradients(draw, schedule, workload, kinds)
            if zero_stage == 1 or any(group.gradients == "sharded" for group in schedule.groups):
                break
        drawn += ["during the backward, shards in host memory"] if any(g.shard_rests for g in schedule.groups) else []
        schedule = replace(schedule, rollback_bytes=1 << 20)
        clip = draw.choice(("1e9", "1e-4"))  # no step is taken back, every step is
        if overflow:
            clip = ("1e-4", "1e9")[turn_of(seed) % 2]
        options = ["--gpus-per-node", "2", "--optimizer-cpu-offload", "--clip-grad", clip]
        options += between_iterations(more, path)
        drawn += [f"during the backward, zero stage {zero_stage}, clip {clip}", f"overflow: {overflow}, clip {clip}"]
        drawn += sorted({f"during the backward, gradients {group.gradients}" for group in schedule.groups})
        how = dict(meddle="overflow", iterations=5) if overflow else {}
        if overflow and clip == "1e9":  # the optimizer skips its step while threads still step
            how["slow"] = {"thread_seconds": 0.4}
        on_drive = len(schedule.groups) > 1 and (turn_of(seed) // 2 + overflow) % 2 == 1
        if on_drive:
            last = len(schedule.groups) - 1
            chosen = [index for index in range(1, last) if more.random() < 0.5] + [last]
            schedule = states_on_drive(schedule, workload, chosen, slots=more.choice((2, 3)))
            drawn.append("during the backward, states on the drive")
        cast = ("device", "host", None)[(turn_of(seed) + overflow) % 3]  # each at each zero stage
        if cast is not None:
            schedule = with_step_slots(schedule, workload, slots=more.choice((2, 3)), cast=cast)
            drawn.append(f"during the backward, parameters cast on the {cast}")
        if (on_drive or more.random() < 0.7) and publish_unread(more, schedule, path):
            drawn.append("during the backward, published, unread")
        else:
            _save(schedule, path)
        return _case(draw, seed, path, name, options=options, drawn=drawn, steps_on_host=True, **how)

    return case


def _delayed(draw, workloads, path: Path, seed: int, zero_stage: int) -> dict:
    """The host's optimizer steps during the next iteration, with evaluations between two. At zero stage 3 shards of
    drawn groups rest on the host, and are read by what the start of the next iteration issues, when the last update is
    applied. States of drawn groups rest on the drive."""
    more = further(seed)
    zero_stage = (3, 2, 3, 1)[turn_of(seed) % 4]
    workload = _sized(workloads, STRICT, "bf16-offload", zero_stage, 2)
    workload = replace(workload, optimizer=OptimizerSettings(on_host=True, delayed=True))
    for number in itertools.count(seed):
        schedule = draw_schedule(random.Random(number), workload)
        schedule = _some_shards_on_host(random.Random(number), schedule, workload)
        if zero_stage != 3 or any(item.route == SHARD_GATHER for item in schedule.ranks[0].start.unshard):
            break
    schedule = with_gradients(draw, schedule, workload, GRADIENTS)
    chosen = [index for index in range(len(schedule.groups)) if more.random() < 0.5]
    _save(states_on_drive(schedule, workload, chosen, slots=2), path)
    options = ["--gpus-per-node", "2", "--delayed-parameter-update", "1"]
    options += between_iterations(more, path, evaluations=1)
    drawn = [f"delayed, zero stage {zero_stage}", f"delayed, states on the drive: {len(chosen) > 0}"]
    drawn += sorted({f"delayed, gradients {group.gradients}" for group in schedule.groups})
    drawn += ["delayed, --save"] if "--save" in options else []
    return _case(draw, seed, path, "bf16-offload", steps_on_host=True, options=options, drawn=drawn, iterations=4)


def _some_shards_on_host(draw, schedule: Schedule, workload) -> Schedule:
    """At zero stage 3 drawn groups are gathered from shards that rest in host memory."""
    if workload.zero_stage != 3:
        return schedule
    chosen = {index for index in range(len(schedule.groups)) if draw.random() < 0.6}
    by_shard = lambda item: item.group in chosen and kind_of(item.route).needs_device_shard
    schedule = rerouted(schedule, lambda item: SHARD_GATHER if by_shard(item) else item.route)
    return with_host_shards(schedule, workload)


def _stepped_on_the_device(draw, workloads, path: Path, seed: int, zero_stage: int) -> dict:
    """Every second group is; at zero stage 3 the others are stepped during the backward."""
    workload = _sized(workloads, STRICT, "bf16-offload", zero_stage, 2)
    workload = replace(workload, optimizer=OptimizerSettings(on_host=True))
    schedule = with_gradients(draw, draw_schedule(draw, workload, ("cpu", "gpu")), workload, (None, "sharded"))
    schedule = states_on_device(schedule, list(range(0, len(schedule.groups), 2)))
    schedule = replace(schedule, rollback_bytes=1 << 20 if zero_stage == 3 else None)
    _save(schedule, path)
    how = dict(
        options=["--gpus-per-node", "2", "--clip-grad", "1e-4"], drawn=[f"on the device, zero stage {zero_stage}"]
    )
    return _case(draw, seed, path, "bf16-offload", steps_on_host=True, **how)


def _two_legs(draw, workloads, path: Path, seed: int, zero_stage: int) -> dict:
    workload = _sized(workloads, FOUR, "fp32", zero_stage, 2)
    for number in itertools.count(seed):
        schedule = prepared(random.Random(number), workload, path, ("gpu", "gpu", "cpu"), gradients=(None,))
        legs = {index for index, group in enumerate(schedule.groups) if group.algorithm == HIERARCHICAL}
        if any(item.group in legs and item.route == "gpu" for item in schedule.ranks[0].start.unshard):
            break
    drawn = [f"two legs, zero stage {zero_stage}"]
    return _case(draw, seed, path, "fp32", options=["--gpus-per-node", "2"], drawn=drawn, layout=FOUR)


def _symmetric(draw, workloads, path: Path, seed: int, zero_stage: int) -> dict:
    workload = _sized(workloads, STRICT, "bf16-tied", zero_stage, 2)
    for number in itertools.count(seed):
        schedule = draw_schedule(random.Random(number), workload, ("gpu", "gpu", "cpu"), symmetric=True)
        if len(schedule.groups) > 2:
            break
    _save(schedule, path)
    how = dict(options=["--gpus-per-node", "2"], drawn=[f"symmetric, zero stage {zero_stage}"])
    return _case(draw, seed, path, "bf16-tied", **how)


def _never_whole(draw, workloads, path: Path, seed: int, zero_stage: int) -> dict:
    """The parameters of a rank never fit whole; evaluations and checkpoints bring groups one after the other."""
    name = draw.choice(("bf16-tied", "fp32"))
    workload = _sized(workloads, STRICT, name, 3, 2)
    never_whole(draw, workload, path, ("gpu", "cpu", "nvme"))
    options = ["--gpus-per-node", "2", *between_iterations(further(seed), path, evaluations=1)]
    return _case(draw, seed, path, name, options=options, drawn=["never whole"])


AIMS = {
    "changed behind a copy": _changed_behind_a_copy,
    "unread, on another node": _unread_on_another_node,
    "steps during the backward": _beside_the_backward(False),
    "steps taken back": _beside_the_backward(True),
    "symmetric buffers": _symmetric,
    "through the drive, on one node": _through_the_drive(2),
    "through the drive, to another node": _through_the_drive(1),
    "two legs": _two_legs,
    "updates that are delayed": _delayed,
    "updates that are made on the device": _stepped_on_the_device,
    "whole one after the other": _never_whole,
}
"""``AIMS[name](draw, workloads, path, seed, zero_stage)``: a case that needs what others rarely need."""


def aim_of(seed: int) -> str | None:
    """Which of :data:`AIMS` case ``seed`` has, or None."""
    return sorted(AIMS)[seed // EVERY % len(AIMS)] if seed % EVERY == EVERY - 1 else None


def publish_unread(draw, schedule: Schedule, path: Path) -> bool:
    """Let drawn groups be published to the host where no route reads them; whether there are any."""
    to = {entry.group: entry.to for entry in schedule.publish}
    more = [index for index in range(len(schedule.groups)) if "cpu" not in to.get(index, ()) and draw.random() < 0.6]
    _publish(schedule, to | {index: ("cpu", *to.get(index, ())) for index in more}, path)
    return bool(more)


def _publish(schedule: Schedule, to: dict[int, tuple[str, ...]], path: Path) -> None:
    _save(replace(schedule, publish=tuple(PublishGroup(group=group, to=where) for group, where in to.items())), path)


def _save(schedule: Schedule, path: Path) -> None:
    validate.validate(schedule)
    schedule_file.save(path, schedule)


def findings(answer: dict) -> list[str]:
    """What the stand-in says against a case, unless everything is ordered and in its place."""
    strict = answer["strict"]
    found = [f"unordered: {one} / {other}" for one, other in strict["races"]]
    first, *others = strict["symmetric_gathers"]
    if any(None in places for places in first) or any(other != first for other in others):
        found.append("a symmetric gather is not in registered memory, at one place on all ranks")
    found += [f"issued in different orders: {one}" for one in strict["crossed"]]
    found += strict["errors"] + strict["misplaced"] + strict["circles"] + strict["stopped"]
    return found + [f"never: {timeline} {entry}" for timeline, entry in strict["stuck"].items()]


def waits(case: dict, answer: dict) -> list[str]:
    """Waits of the training thread in training steps, where streams wait for flags; but those for gradients that the
    host's processor adds, or steps on."""
    if case.get("steps_on_host"):
        return []
    return [wait for wait in answer["strict"]["host_waits"] if "gradients.py" not in wait]
