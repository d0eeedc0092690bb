"""Train drawn schedules on a strict stand-in of a CUDA device, then take every ordering of the runtime away in turn.

    python benchmarks/strict_device.py [--cases 200] [--tries 10] [--out benchmarks/results/strict_device.json]

The stand-in (``tests/helpers/strict_device.py``) runs streams late, early or in drawn order, keeps the host's and the
device's memory apart, reuses freed blocks at once, lets one thread alone call the driver, and reports accesses that
nothing orders and waits that could go in a circle. Two replicas train each
case at zero stages 1 to 3, by every route, with skipped steps, evaluation, checkpoints and parameters that something
else than the optimizer changes; each must equal Megatron's own gathers to the last bit. Then each call of an event,
wait, record or flag in ``megatron_ext/runtime`` that any case came by is left out in up to ``--tries`` of those cases,
as unlike each other as there are, and in one of each aim: by a report, another result or an ended run that must be
seen. A run that is stopped goes on where it was when it is begun again. No GPU takes part.
"""

import argparse
import hashlib
import itertools
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import machine
import orderings
from cases import MODELS, STRICT
from parity import describe
from parity_service import Died, ParityService, differences
from strict_cases import FOUR, PIPELINE, aim_of, findings, strict_case, turn_of, waits

from megatron_ext.workload import workload as workload_file

CASE_SECONDS = 230
"""After so long a case counts as hanging; on a machine that others use as well it may take as long as a hundred."""

PATIENCE = 4
"""After so many seconds without an ordering a wait for the device counts as endless."""


class Kept:
    """What a run has found so far, a line each, beside its result: a run that is stopped goes on from there when it is
    begun again, with the same code.

    Args:
        command: what a run was asked for.
    """

    def __init__(self, path: Path, command: str):
        code = hashlib.sha256()
        for file in sorted(file for part in ("megatron_ext", "tests/helpers") for file in (ROOT / part).rglob("*.py")):
            code.update(file.read_bytes())
        begins, self._path = [command, code.hexdigest()], path
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        lines = lines if lines[:1] == [begins] else [begins]
        self._known, self._file = dict(lines[1:]), path.open("w")
        for line in lines:
            self._add(line)

    def get(self, name: str, find: Callable):
        """What ``find()`` returns, or has returned before the run was stopped."""
        if name not in self._known:
            self._known[name] = find()
            self._add([name, self._known[name]])
        return self._known[name]

    def _add(self, line: list) -> None:
        print(json.dumps(line), file=self._file, flush=True)

    def remove(self) -> None:
        """The result is written."""
        self._file.close()
        self._path.unlink()


class Cases:
    """Trains cases by their seeds, each once by Megatron's own gathers; the ranks stay up between them."""

    def __init__(self, folder: Path):
        self._services: dict[str, ParityService] = {}
        self._references: dict[int, dict] = {}
        known = itertools.product((STRICT, FOUR, PIPELINE), MODELS)
        self._workloads = {
            (layout, name): workload_file.load(folder / f"{layout}.{name}.json") for layout, name in known
        }

    def run(self, seed: int, **strict) -> dict:
        """The answer of the ranks; ``waits`` are those of the training thread, where streams wait for flags.

        Raises:
            Died: a rank failed, or the case did not end.
        """
        with tempfile.TemporaryDirectory() as folder:
            case = strict_case(seed, self._workloads, Path(folder))
            case["strict"] |= strict
            service = self._service(case.pop("layout"))
            answer = service.run(**case, reference=seed not in self._references)
            answer["reference"] = self._references.setdefault(seed, answer.get("reference"))
            return answer | {"waits": waits(case, answer), "drawn": case["drawn"]}

    def _service(self, layout: str) -> ParityService:
        if layout not in self._services:
            self._services[layout] = ParityService(layout, case_seconds=CASE_SECONDS, strict=True)
        return self._services[layout]

    def close(self) -> None:
        for service in self._services.values():
            service.close()


def as_it_is(cases: Cases, seed: int) -> tuple[dict, list[str], list[str]]:
    """What a case has that it must not have, the sites that it came by, and what was drawn for it."""
    try:
        answer = cases.run(seed)
    except Died as died:
        return {"seed": seed, "died": str(died)[-600:]}, [], []
    found = {"findings": findings(answer), "differences": differences(answer), "waits": answer["waits"]}
    found = {"seed": seed, **{name: value for name, value in found.items() if value}}
    return found, answer["strict"]["reached"], answer["drawn"]


def unlike(seeds: list[int], drawn: dict[int, list[str]], most: int) -> list[int]:
    """Up to ``most`` of ``seeds``: each has what is rarest among those before it."""
    chosen, known = [], Counter()
    while len(chosen) < min(most, len(seeds)):
        rest = [seed for seed in seeds if seed not in chosen]
        chosen.append(max(rest, key=lambda seed: sum(0.5 ** known[word] for word in drawn[seed])))
        known.update(drawn[chosen[-1]])
    return chosen


def one_of_each_aim(seeds: list[int]) -> list[int]:
    """The first of ``seeds`` with each aim and zero stage."""
    found = {(aim_of(seed), turn_of(seed) % 2): seed for seed in reversed(seeds)}
    return [seed for (aim, _), seed in found.items() if aim is not None]


def ends_well(cases: Cases, seed: int) -> bool:
    """Whether nothing but an ordering that is taken away ends a case: it gets to its end with the same patience."""
    try:
        cases.run(seed, stuck_seconds=PATIENCE)
    except Died:  # the machine is too slow for it
        return False
    return True


def without(cases: Cases, site: str, seeds: list[int]) -> str | None:
    """How it is seen that ``site`` was taken away; None where it is not."""
    for seed in seeds:
        try:
            answer = cases.run(seed, off=site, stuck_seconds=PATIENCE)
        except Died:
            if ends_well(cases, seed):
                return "ended"
            continue
        if findings(answer):
            return "reported"
        if differences(answer):
            return "another result"
    return None


def together(before: dict, again: dict) -> dict:
    """A result with what was seen, or reached, only when it was tried again; without what the code has no more."""
    seen_by, there = Counter(before["seen_by"]) + Counter(again["seen_by"]), orderings.sites()
    unseen, not_reached = ([site for site in before[kind] if site in there] for kind in ("unseen", "not_reached"))
    reached_again = sum(site not in again["not_reached"] for site in not_reached)
    return {
        **before,
        "wrong": before["wrong"] + again["wrong"],
        "orderings": len(there),
        "not_reached": [site for site in not_reached if site in again["not_reached"]],
        "taken_away": before["seen"] + len(unseen) + reached_again,
        "seen": before["seen"] + again["seen"],
        "seen_by": dict(sorted(seen_by.items())),
        "unseen": [site for site in unseen if site in again["unseen"] + again["not_reached"]]
        + [site for site in not_reached if site in again["unseen"]],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--tries", type=int, default=10)
    parser.add_argument("--sites", default="", help="leave out only those whose name contains this")
    parser.add_argument("--again", help="a result: take away what it has not seen, in aimed cases up to --cases")
    parser.add_argument("--out", default="benchmarks/results/strict_device.json")
    args = parser.parse_args()
    begin, load = time.time(), os.getloadavg()[0]
    command = f"python benchmarks/strict_device.py --cases {args.cases} --tries {args.tries}"
    before = json.loads(Path(args.again).read_text()) if args.again else {}
    wanted = [*before.get("unseen", ()), *before.get("not_reached", ())] if before else orderings.sites()
    kept = Kept(Path(args.out).with_suffix(".kept"), f"{command} {args.sites} {wanted}")
    wrong, seeds_of, seen, drawn = [], {site: [] for site in wanted}, {}, {}
    with tempfile.TemporaryDirectory() as folder:
        describe(Path(folder))
        cases = Cases(Path(folder))
        for seed in range(args.cases):
            if before and aim_of(seed) is None:
                continue
            found, reached, drawn[seed] = kept.get(f"case {seed}", partial(as_it_is, cases, seed))
            for site in seeds_of.keys() & set(reached):
                seeds_of[site].append(seed)
            if len(found) > 1:
                wrong.append(found)
                print(found, file=sys.stderr, flush=True)
            if seed % 20 == 19:
                print(f"{seed + 1} cases, {len(wrong)} wrong, {time.time() - begin:.0f} s", flush=True)
        for site, seeds in seeds_of.items():
            if seeds and args.sites in site:
                chosen = unlike(seeds, drawn, args.tries) + one_of_each_aim(seeds)
                seen[site] = kept.get(site, partial(without, cases, site, chosen))
                print(f"{time.time() - begin:5.0f} s {site}: {seen[site]}", flush=True)
        cases.close()
    unseen = [site for site, how in seen.items() if how is None]
    result = {
        "cases": args.cases,
        "wrong": wrong,
        "orderings": len(seeds_of),
        "not_reached": [site for site, seeds in seeds_of.items() if not seeds],
        "taken_away": len(seen),
        "seen": len(seen) - len(unseen),
        "seen_by": dict(sorted(Counter(how for how in seen.values() if how).items())),
        "unseen": unseen,
    }
    if before:
        result = together(before, result)
        command = f"{before['command']}; again with --again and --cases {args.cases}"
    machine.write(args.out, {**result, "command": command}, load_before=load)
    kept.remove()
    print(f"{result['cases'] - len(result['wrong'])} of {result['cases']} cases right")
    print(f"{result['seen']} of {result['taken_away']} taken away seen")
    return 1 if wrong or result["seen"] < 0.95 * result["taken_away"] else 0


if __name__ == "__main__":
    sys.exit(main())
