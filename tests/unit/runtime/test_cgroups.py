"""How many processors' time a container or a job may use."""

import pytest

from megatron_ext.runtime import cgroups


@pytest.mark.parametrize(
    "own, files, number",
    [
        ("", {}, 96),
        ("0::/job/step", {"job/cpu.max": "1600000 100000", "job/step/cpu.max": "max 100000"}, 16),
        ("0::/", {"cpu.max": "250000 100000"}, 2),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/", {"cpu.max": "max 100000"}, 96),
        ("3:cpuset:/a\n1:cpu,cpuacct:/b", {"cpu/b/cpu.cfs_quota_us": "400000", "cpu/b/cpu.cfs_period_us": "100000"}, 4),
        ("1:cpu:/b\n0::/", {"cpu/b/cpu.cfs_quota_us": "-1", "cpu/b/cpu.cfs_period_us": "100000"}, 96),
    ],
)
def test_no_more_processors_than_the_quota_is_worth(tmp_path, monkeypatch, own, files, number):
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    monkeypatch.setattr(cgroups, "OWN", tmp_path / "own")
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert cgroups.processor_quota(96) == number
