"""Drawn cases for the strict stand-in of a device: two replicas of a small model, trained with everything around it."""

import random
from pathlib import Path

from cases import MODELS, STRICT
from draw_schedule import prepared
from msgspec.structs import replace

from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.schedule import validate
from megatron_ext.schedule.user_defined_schedule import PublishGroup, Schedule
from megatron_ext.workload.workload import Limits

NAMES = ("bf16-tied", "fp16", "fp32")
ROUTES = (("gpu", "cpu", "nvme"), ("cpu",), ("gpu", "cpu"), ("nvme",), ("cpu", "nvme"))
ORDERS = ("late", "early", "drawn")


def strict_case(seed: int, workloads, folder: Path, zero_stage: int | None = None) -> dict:
    """Case ``seed`` for ``ParityService.run``: model, zero stage, schedule, nodes, order of the streams, whether
    streams or threads wait for flags, evaluation, checkpoints, whether parameters are changed between two iterations
    (``params_changed``), whether groups are published that nobody reads. Models in fp16 skip their first steps.
    ``drawn`` says what was drawn."""
    draw = random.Random(seed)
    name, order, routes = NAMES[seed % 3], draw.choice(ORDERS), ROUTES[seed % len(ROUTES)]
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
    if draw.random() < 0.5:
        options += ["--eval-interval", "2", "--eval-iters", "1"]
    if draw.random() < 0.5:
        options += ["--save", str(folder / f"{seed}.checkpoints"), "--save-interval", "2"]
    stream_flags, changed = draw.random() < 0.75, draw.random() < 0.5
    unread = draw.random() < 0.3 and publish_unread(draw, schedule, path)
    drawn = [f"{name}, zero stage {zero_stage}", " ".join(routes), order, f"{nodes} ranks a node"]
    drawn += ["streams store flags" if stream_flags else "threads store flags"]
    drawn += [word for word in ("--eval-iters", "--save") if word in options]
    drawn += sorted({f"gradients {group.gradients}" for group in schedule.groups})
    under_way = schedule.ranks[0].start.unshard[-1:]  # where nothing is gathered behind it, nothing else orders it
    last = [item for item in under_way if item.group == len(schedule.groups) - 1 and item.route in ("cpu", "nvme")]
    hosted = any(group.shard_rests for group in schedule.groups)
    if changed:  # what parameters are changed beside, in one word
        how = ("behind a copy" if last else "", "shards on the host" if hosted else "", nodes, stream_flags)
        drawn += ["params_changed", f"params_changed {how}"]
    return {
        "drawn": drawn + (["published, unread"] if unread else []),
        "meddle": "told" if changed else None,
        "options": options,
        "schedule": path,
        "iterations": 4 if name == "fp16" else 3,
        "strict": {"seed": seed, "order": order, "stream_flags": stream_flags},
    }


def publish_unread(draw, schedule: Schedule, path: Path) -> bool:
    """Let drawn groups be published to the host where no route reads them; whether there are any."""
    to = {entry.group: entry.to for entry in schedule.publish}
    more = [index for index in range(len(schedule.groups)) if "cpu" not in to.get(index, ()) and draw.random() < 0.6]
    to |= {index: ("cpu", *to.get(index, ())) for index in more}
    schedule = replace(schedule, publish=tuple(PublishGroup(group=group, to=where) for group, where in to.items()))
    validate.validate(schedule)
    schedule_file.save(path, schedule)
    return bool(more)


def findings(answer: dict) -> list[str]:
    """What the stand-in says against a case, unless everything is ordered and in its place."""
    strict = answer["strict"]
    found = [f"unordered: {one} / {other}" for one, other in strict["races"]]
    return found + strict["errors"] + [f"never: {timeline} {entry}" for timeline, entry in strict["stuck"].items()]


def waits(answer: dict) -> list[str]:
    """Waits of the training thread in training steps, but those for gradients that the host's processor adds."""
    return [wait for wait in answer["strict"]["host_waits"] if "gradients.py" not in wait]
