"""What cannot be tried on a machine, and why; said before anything of it is started."""

from importlib.util import find_spec

from case_table import Program, Training
from gpu_report import SHORT_OF_DEVICE, Result
from job_runs import Place

TESTS_NEED = ("pytest", "hypothesis", "xdist", "pytest_timeout")


def untried(case: Training | Program, place: Place) -> Result | None:
    """The result of a case that cannot be tried here; of several reasons the last one."""
    why = [said for reason in (_software, _drive, _host, _ranks, _device) if (said := reason(case, place))]
    return Result(case=case.name, status="could not try", said=why[-1]) if why else None


def _software(case: Training | Program, place: Place) -> str:
    if case.on_host and not place.dry_run and not place.engine:
        return f"Megatron's host optimizer needs Transformer Engine: {place.no_engine}"
    if case.needs_flags and place.no_flags:
        return f"copies between host and device need streams that wait for flags: {place.no_flags}"
    if case.name.startswith("CPU suite") and not all(map(find_spec, TESTS_NEED)):
        return "what tests need is not installed: WITH_TESTS=1"
    return ""


def _drive(case: Training | Program, place: Place) -> str:
    """A drive may be there and be so slow that a case would seem to hang: half of its limit is for the drive."""
    if not case.needs_drive:
        return ""
    if place.no_drive:
        return f"no directory on a drive that takes direct reads (--drive): {place.no_drive}"
    moved = case.drive_bytes if isinstance(case, Training) else 0
    if place.drive_rate is not None and 2 * moved > case.limit * place.drive_rate:
        return f"moves {moved / 1e9:.0f} GB over a drive that moves {place.drive_rate / 1e6:.0f} MB/s (--drive)"
    return ""


def _host(case: Training | Program, place: Place) -> str:
    if place.host_bytes is None or case.host_bytes <= place.host_bytes:
        return ""
    return f"takes up to {case.host_bytes / 1e9:.0f} GB of host memory, {place.host_bytes / 1e9:.0f} are free"


def _ranks(case: Training | Program, place: Place) -> str:
    if case.ranks > 1 and place.one_process:
        return "the device is in a compute mode in which one process has it: nvidia-smi -c DEFAULT"
    if place.shared_bytes is None or case.shared_bytes <= place.shared_bytes:
        return ""
    return (
        f"/dev/shm has {place.shared_bytes >> 20} MiB free, {case.shared_bytes >> 20} may be needed: NCCL takes 33 MB "
        "for each rank of each communicator: docker run --shm-size 16g, or --ipc=host"
    )


def _device(case: Training | Program, place: Place) -> str:
    if place.device_bytes is None or case.device_bytes <= place.device_bytes:
        return ""
    need, there = case.device_bytes / 1e9, place.device_bytes / 1e9
    return f"{SHORT_OF_DEVICE} {need:.0f} GB of device memory, {place.device} has {there:.0f} free"
