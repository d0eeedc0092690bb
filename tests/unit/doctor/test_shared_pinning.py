"""Where the pages of a block lie."""

import pytest

from megatron_ext.doctor.shared_pinning import huge_pages, pages_of_nodes

MAPS = """\
7f0000000000 interleave:0-1 file=/memfd:megatron_ext\\040(deleted) dirty=300 N0=150 N1=150 kernelpagesize_kB=4
7f1000000000 default anon=9 dirty=9 N0=9 kernelpagesize_kB=4
7f2000000000 interleave:0-1 file=/memfd:megatron_ext\\040(deleted) dirty=3 N1=3 kernelpagesize_kB=4
"""


def test_pages_are_counted_by_node(tmp_path):
    (tmp_path / "numa_maps").write_text(MAPS)
    assert pages_of_nodes(tmp_path / "numa_maps", "memfd:megatron_ext") == {0: 150, 1: 153}


def test_a_system_that_does_not_say(tmp_path):
    assert pages_of_nodes(tmp_path / "absent", "memfd:megatron_ext") == {}


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("always within_size advise [never] deny force\n", "pass"),
        ("always within_size [advise] never deny force\n", "pass"),
        ("[always] within_size advise never deny force\n", "pass"),
        (None, "could not try"),
    ],
)
def test_what_the_kernel_allows_shared_memory(tmp_path, text, status):
    setting = tmp_path / "shmem_enabled"
    if text is not None:
        setting.write_text(text)
    finding = huge_pages(setting)
    assert finding.status == status and bool(finding.advice) == (text is not None and "[never]" in text)
