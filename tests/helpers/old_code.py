"""Whether the stand-in reports, of the package in another checkout, the faults that a first GPU showed (W1, W2).

    python tests/helpers/old_code.py CHECKOUT [--expect none]

The stand-in and the cases are those beside this file. The package, the example, the Megatron tree and how schedules are
drawn (``draw_schedule``, which follows the package's own files) are CHECKOUT's.

W1  gradients in host memory, the optimizer on the host, clipping active: a kernel of the device scales what the
    processor then copies.
W2  route ``nvme``, streams that wait for flags: the training thread waits inside the driver for a stream that waits for
    a flag, before whose store another thread frees an event.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

HELPERS = Path(__file__).parent


def started(arguments: list[str], cwd: Path, environment: dict[str, str], out, error) -> subprocess.Popen:
    """As ``warm_python.WarmPython``, from nothing, and by torch's launcher: the package's own has moved."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, *arguments[arguments.index("--nproc-per-node") :]]
    return subprocess.Popen(command, cwd=cwd, env=environment, stdout=out, stderr=error)


if __name__ == "__main__":
    CHECKOUT = str(Path(sys.argv[1]).resolve()) if sys.argv[1:] else ""
    os.environ |= {"MEGATRON_EXT_TEST_ROOT": CHECKOUT, "PYTHONPATH": CHECKOUT, "OMP_NUM_THREADS": "1"}
    sys.path[:0] = [CHECKOUT, f"{CHECKOUT}/.megatron", f"{CHECKOUT}/tests/helpers"]
    import draw_schedule

    sys.path[2] = str(HELPERS)
    # Its ranks start by themselves: what forks them from a warm process needs the package of today.
    warm = SimpleNamespace(WarmPython=started, IMPORTED="", finished=None)
    sys.modules["warm_python"] = warm  # type: ignore[assignment]

from cases import MODELS, STRICT
from draw_schedule import draw_schedule, prepared, with_gradients
from msgspec.structs import replace
from parity_service import Died, ParityService, differences
from training import environment

from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.schedule import validate
from megatron_ext.workload import workload as workload_file
from megatron_ext.workload.optimizer_settings import OptimizerSettings
from megatron_ext.workload.workload import Limits

ORDERS = ("late", "drawn")


def _workload(folder: Path, name: str, zero_stage: int):
    workload = workload_file.load(folder / f"{STRICT}.{name}.json")
    parallel = replace(workload.parallel, gpus_per_node=2)
    return replace(workload, zero_stage=zero_stage, limits=Limits(nvme_slots=2), parallel=parallel)


def _case(folder: Path, path: Path, name: str, order: str, *options: str) -> dict:
    options = [*MODELS[name], "--gpus-per-node", "2", "--user-defined-schedule-nvme-path", str(folder), *options]
    return {"options": options, "schedule": path, "iterations": 4, "strict": {"seed": 1, "order": order}}


def clipped_on_the_host(folder: Path, order: str) -> dict:
    """The case of W1."""
    workload = replace(_workload(folder, "bf16-offload", 3), optimizer=OptimizerSettings(on_host=True))
    draw, path = random.Random(1), folder / "clipped.json"
    schedule = with_gradients(draw, draw_schedule(draw, workload, ("cpu", "gpu")), workload, ("host",))
    schedule_file.save(path, validate.validate(schedule))
    return _case(folder, path, "bf16-offload", order, "--clip-grad", "1e-4")


def read_from_the_drive(folder: Path, order: str) -> dict:
    """The case of W2."""
    path = folder / "drive.json"
    prepared(random.Random(1), _workload(folder, "fp32", 3), path, ("nvme",), gradients=(None,))
    return _case(folder, path, "fp32", order)


def is_w1(answer: dict) -> list[str]:
    """Races between a kernel of the device and the processor, on the same bytes."""
    races = [" / ".join(pair) for pair in answer["strict"]["races"]]
    return [race for race in races if "kernel multi_tensor" in race and "by the processor" in race]


def is_w2(answer: dict) -> list[str]:
    """Circles of the training thread's copy to the host with a thread that frees an event."""
    circles = answer["strict"]["circles"] + answer["strict"]["stopped"]
    return [one for one in circles if "MainThread holds" in one and "freeing an event" in one and "nvme-read" in one]


FAULTS = {"W1": (clipped_on_the_host, is_w1), "W2": (read_from_the_drive, is_w2)}
"""The case that shows each fault, by order of the streams, and what in an answer is this fault."""


def judged(service: ParityService, folder: Path, fault: str) -> tuple[list[str], list[str], dict[str, int]]:
    """What of ``fault`` is reported, why ranks died, and how many reports of each kind there are in all."""
    make, is_fault = FAULTS[fault]
    said, deaths, counts = (
        [],
        [],
        dict.fromkeys(("races", "circles", "stopped", "misplaced", "errors", "differences"), 0),
    )
    for order in ORDERS:
        try:
            answer = service.run(**make(folder, order))
        except Died as died:
            deaths.append(f"the ranks died, which reports nothing: {str(died)[-3000:]}")
            continue
        said = [*dict.fromkeys(said + is_fault(answer))]
        for kind in counts:
            counts[kind] += len(differences(answer) if kind == "differences" else answer["strict"][kind])
    return said, deaths, counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout")
    parser.add_argument("--expect", choices=("faults", "none"), default="faults")
    args = parser.parse_args()
    print(f"judged: {Path(schedule_file.__file__).parents[1]}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        models = [f"{STRICT}.bf16-offload", f"{STRICT}.fp32"]
        describe = [sys.executable, str(HELPERS / "describe_cases.py"), temporary, *models]
        subprocess.run(describe, env=environment(), check=True)
        service, right = ParityService(STRICT, strict=True), True
        for fault in FAULTS:
            said, deaths, counts = judged(service, folder, fault)
            right = right and not deaths and bool(said) == (args.expect == "faults")
            print(f"\n{fault}: {'REPORTED' if said else 'not reported'}; {counts}")
            for text in deaths + said[:4]:
                print(text)
        service.close()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
