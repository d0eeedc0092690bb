"""Fuzzing of every kind of input (robustness_inputs.py), by Hypothesis and, coverage-guided, by atheris.

    python benchmarks/robustness_fuzzing.py FOLDER ENGINE EXAMPLES SECONDS KIND...

writes what it found to FOLDER/KIND.ENGINE.json all along, so that an interruption loses nothing. An input is to be
accepted, or refused by one line with exit code 2. Anything else counts as a traceback, and as a hang what takes more
than LONGEST_SECONDS of processor time.
"""

import contextlib
import hashlib
import importlib
import io
import os
import pkgutil
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import robustness_inputs
from robustness_inputs import Kind, mutated

from megatron_ext.formats import json_files
from megatron_ext.formats.errors import InputError

LONGEST_SECONDS = 30.0
"""Of processor time, so that other programs make no input seem slow."""

ROOMS = ("cost", "schedule", "workload", "simulator", "planner", "bounds", "report")
"""Whose lines guide atheris."""

MOST_BYTES = 4 << 30
"""Address space that one input may take beyond what the program has when it begins."""


class TooLong(BaseException):
    """An input takes more than LONGEST_SECONDS of processor time."""


def _too_long(number, frame):
    raise TooLong(f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})")


class Tried:
    """What became of the inputs of one kind; the first of every failure is kept with its input."""

    def __init__(self, folder: Path, kind: Kind, out: Path):
        self.folder, self.kind, self.out = folder, kind, out
        self.file = folder / kind.name
        self.good = self.file.read_bytes() if self.file.exists() else None
        self.inputs, self.refused, self.slowest_s = 0, 0, 0.0
        self.seen: set[bytes] = set()
        self.failures: dict[str, dict] = {}
        self.counts: Counter[str] = Counter()
        signal.signal(signal.SIGPROF, _too_long)

    def __call__(self, data: bytes) -> None:
        if (digest := hashlib.sha1(data).digest()) in self.seen:
            return
        self.seen.add(digest)
        self.file.write_bytes(data)
        began = time.process_time()
        failure = self._failure(data)
        self.slowest_s = max(self.slowest_s, time.process_time() - began)
        self.inputs += 1
        if failure is not None:
            key = failure.strip().splitlines()[-1][:80]
            self.counts[key] += 1
            self.failures.setdefault(key, {"said": failure[-3000:], "input": data.decode("latin-1")[:20_000]})
        if self.inputs % 50 == 0:
            self.save()

    def _failure(self, data: bytes) -> str | None:
        said = io.StringIO()
        signal.setitimer(signal.ITIMER_PROF, LONGEST_SECONDS)
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
                code = self.kind.use(self.file, data) or 0
        except InputError as refused:
            code = 2
            said.write(str(refused))
        except TooLong as slow:
            return f"hang: more than {LONGEST_SECONDS:g} s in {slow}"
        except BaseException:
            return traceback.format_exc()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        self.refused += code == 2
        text = said.getvalue()
        if code not in (0, 2) or "Traceback" in text:
            return f"exit code {code}: {text}"
        return f"not one line: {text}" if code == 2 and len(text.strip().splitlines()) > 1 else None

    def save(self) -> None:
        found = {"inputs": self.inputs, "refused": self.refused, "slowest_s": round(self.slowest_s, 2)}
        json_files.save(self.out, found | {"counts": self.counts, "failures": self.failures}, indent=1)
        if self.good is not None:  # the next kind finds good neighbours
            self.file.write_bytes(self.good)


def by_hypothesis(tried: Tried, examples: int, seconds: float) -> None:
    """So many drawn changes, or for so long."""
    from hypothesis import HealthCheck, Phase, given, seed, settings
    from hypothesis import strategies as st

    ends = time.monotonic() + seconds

    @seed(0)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.randoms(use_true_random=False), st.sampled_from(tried.kind.seeds))
    def one(draw, data):
        changed = mutated(draw, data)  # in time or not: Hypothesis wants the same draws from the same choices
        if time.monotonic() < ends:
            tried(changed)

    one()


def by_atheris(tried: Tried, examples: int, seconds: float) -> None:
    """libFuzzer chooses which inputs to change further, by the lines that they reach. Does not return."""
    import atheris

    import megatron_ext

    with atheris.instrument_imports(include=["megatron_ext"], enable_loader_override=False):  # pyright: ignore[reportAttributeAccessIssue]
        for module in pkgutil.walk_packages(megatron_ext.__path__, "megatron_ext."):
            if module.name.split(".")[1] in ROOMS:
                importlib.import_module(module.name)
    corpus = tempfile.mkdtemp(dir=tried.folder)
    for number, data in enumerate(tried.kind.seeds):
        Path(corpus, str(number)).write_bytes(data)
    ends = time.monotonic() + seconds

    def one(data: bytes) -> None:
        if tried.inputs < examples and time.monotonic() < ends:
            tried(data)
            return
        tried.save()
        shutil.rmtree(tried.folder)
        os._exit(0)  # libFuzzer takes any other end for a failure

    def change(data: bytes, max_size: int, seed: int) -> bytes:
        return mutated(random.Random(seed), data)[:max_size]

    longest = 4 * max(map(len, tried.kind.seeds))
    atheris.Setup(
        [sys.argv[0], f"-max_len={longest}", "-verbosity=0", "-seed=1", f"-artifact_prefix={corpus}/", corpus],
        one,
        custom_mutator=change,
    )
    atheris.Fuzz()


def main() -> int:
    out, engine, examples, seconds, *names = sys.argv[1:]
    out = Path(out).resolve()
    folder = Path(tempfile.mkdtemp(dir=robustness_inputs.scratch()))
    try:
        os.chdir(folder)
        kinds = robustness_inputs.kinds(folder)
        if not set(names) <= set(kinds):
            kinds |= robustness_inputs.with_torch(folder)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, resource.RLIM_INFINITY))
        for name in names:
            tried = Tried(folder, kinds[name], out / f"{name}.{engine}.json")
            (by_atheris if engine == "atheris" else by_hypothesis)(tried, int(examples), float(seconds))
            tried.save()
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
