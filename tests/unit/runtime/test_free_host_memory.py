"""Host memory that is short of the copies is refused with the bytes that are missing."""

import pytest

from megatron_ext.formats.errors import InputError
from megatron_ext.runtime import cgroups, free_host_memory


@pytest.fixture
def machine(tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 40 kB\n")
    monkeypatch.setattr(free_host_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    monkeypatch.setattr(cgroups, "OWN", tmp_path / "cgroup")
    return tmp_path


def test_the_smaller_of_machine_and_cgroup(machine):
    assert free_host_memory.available_bytes() == 40 * 1024
    (machine / "memory.max").write_text("max\n")
    (machine / "memory.current").write_text("1000\n")
    assert free_host_memory.available_bytes() == 40 * 1024
    (machine / "memory.max").write_text("11000\n")
    assert free_host_memory.available_bytes() == 10_000


def test_a_limit_counts_wherever_it_is_set_above_the_process(machine):
    """As Slurm sets it: on a cgroup between the root and the process's own."""
    job = machine / "slurm" / "job_7"
    (job / "step").mkdir(parents=True)
    (machine / "cgroup").write_text("0::/slurm/job_7/step\n")
    (job / "memory.max").write_text("9000\n")
    (job / "memory.current").write_text("5000\n")
    assert free_host_memory.available_bytes() == 4000
    (job / "memory.stat").write_text("anon 3000\ninactive_file 1500\nactive_file 500\n")
    assert free_host_memory.available_bytes() == 6000  # cached files make room
    (job / "memory.stat").write_text("inactive_file 1500\nactive_file 900\nfile_mapped 100\nfile_dirty 200\n")
    assert free_host_memory.available_bytes() == 6100  # not those that have to stay
    (job / "memory.stat").write_text("inactive_file 1500\nactive_file 900\nfile_mapped 10000\n")
    assert free_host_memory.available_bytes() == 5500
    (job / "memory.max").unlink()
    assert free_host_memory.available_bytes() == 40 * 1024


def test_limits_of_the_first_version_of_cgroups_count(machine):
    box = machine / "memory" / "box"
    box.mkdir(parents=True)
    (machine / "cgroup").write_text("4:memory:/box\n0::/\n")
    (box / "memory.limit_in_bytes").write_text("7000\n")
    (box / "memory.usage_in_bytes").write_text("1000\n")
    assert free_host_memory.available_bytes() == 6000 and free_host_memory.limit_bytes() == 7000
    (box / "memory.limit_in_bytes").write_text(f"{1 << 62}\n")  # none is set
    assert free_host_memory.limit_bytes() is None


def test_too_little_is_refused(machine):
    free_host_memory.require(40 * 1024, "host copies")
    with pytest.raises(InputError, match="host copies need 41000 bytes of host memory, 40 bytes short"):
        free_host_memory.require(41_000, "host copies")


def test_a_system_that_does_not_say_refuses_nothing(machine, monkeypatch):
    monkeypatch.setattr(free_host_memory, "MEMINFO", machine / "nowhere")
    free_host_memory.require(1 << 60, "host copies")
