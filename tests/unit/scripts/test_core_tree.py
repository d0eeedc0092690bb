"""A release of megatron-core is complete in its place, or absent."""

import zipfile
from pathlib import Path

import core_tree
import pytest
from core_tree import obtain
from toy_megatron import TEXTS, snapshot

from megatron_ext.formats.errors import InputError


@pytest.fixture
def index(monkeypatch):
    """A package index that has the toy's core as release 0.77.3; counts what is fetched."""
    fetched = []

    def from_index(version: str, scratch: Path) -> Path:
        fetched.append(version)
        scratch.mkdir(parents=True, exist_ok=True)
        wheel = scratch / "megatron_core-0.77.3-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for path, text in TEXTS.items():
                if path.startswith("megatron/core/"):
                    archive.writestr(path, text)
        return wheel

    monkeypatch.setattr(core_tree, "download_wheel", from_index)
    return fetched


def test_it_is_fetched_once(index, tmp_path):
    into = tmp_path / "deep" / "core"
    assert obtain("0.77.3", into) == into and (into / "megatron/core/package_info.py").is_file()
    first = snapshot(into)
    obtain("0.77.3", into)
    assert index == ["0.77.3"] and snapshot(into) == first
    assert [p.name for p in into.parent.iterdir()] == ["core"]


def test_an_empty_directory_is_filled(index, tmp_path):
    (tmp_path / "core").mkdir()
    obtain("0.77.3", tmp_path / "core")
    assert (tmp_path / "core" / "megatron").is_dir()


def test_another_version_is_not_replaced(index, tmp_path):
    obtain("0.77.3", tmp_path / "core")
    with pytest.raises(InputError, match="holds megatron-core 0.77.3, not 0.16.1"):
        obtain("0.16.1", tmp_path / "core")


def test_a_wrong_package_leaves_nothing(index, tmp_path):
    with pytest.raises(InputError, match="the package says it is 0.77.3"):
        obtain("0.16.1", tmp_path / "core")
    assert list(tmp_path.iterdir()) == []


def test_something_else_in_its_place_is_kept(index, tmp_path):
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="not a Megatron tree"):
        obtain("0.77.3", tmp_path / "core")
    assert (tmp_path / "core" / "mine.txt").read_text() == "mine" and index == []


@pytest.mark.parametrize("version", ["main", "0.16", "0.16.1; rm", "../x", ""])
def test_not_a_version(version, index, tmp_path):
    with pytest.raises(InputError, match="not a version"):
        obtain(version, tmp_path / "core")
    assert index == []
