"""What an iteration is limited by, in words."""

from collections.abc import Mapping

from megatron_ext.simulator.thread_path import LAUNCHES

HOST_MEMORY = "host_memory"

WORDS = {
    "compute": "compute",
    "gpu": "all-gathers",
    "cpu": "host copies",
    "nvme": "the drive",
    "publish": "publishing",
    "p2p": "messages between stages",
    "reduce": "gradient reduction",
    "host_step": "the host's step",
    "host_add": "adding gradients in host memory",
    "optimizer": "the optimizer's step",
    HOST_MEMORY: "host memory",
    LAUNCHES: "launches from Python",
}
"""What a name of ``busy_us`` means, in words."""

LIMIT_UNKNOWN = (
    "The cost of a memory limit that the system enforces (a cgroup) is not known: it reclaims memory, and reads find "
    "no page cache"
)

IN_HOST_MEMORY = ("cpu", "nvme", "publish", "host_step", "host_add")


def limit_of(busy_us: Mapping[str, float], iteration_time_us: float) -> str:
    """The link that is busy longest, or compute. The result is launches if the training thread takes the whole
    iteration. It is host memory if that is full for more than half of the time of a link that uses it."""
    if busy_us.get(LAUNCHES, 0.0) >= iteration_time_us * (1 - 1e-9):
        return LAUNCHES
    links = {link: us for link, us in busy_us.items() if link not in (LAUNCHES, HOST_MEMORY)}
    busiest = max(links, key=lambda link: (links[link], link), default="compute")
    full = busiest in IN_HOST_MEMORY and busy_us.get(HOST_MEMORY, 0.0) > links[busiest] / 2
    return HOST_MEMORY if full else busiest


def limit_text(limit: str) -> str:
    """The limit as a line."""
    if limit == LAUNCHES:
        return (
            f"limit: {WORDS[limit]}: the training thread needs the whole iteration to issue it. Neither routes nor "
            "memory help here; larger micro-batches or layers do, and fewer of them"
        )
    return f"limit: {WORDS[limit]} ({'full' if limit == HOST_MEMORY else 'what is busy'} longest)"
