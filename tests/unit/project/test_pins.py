"""constraints.txt: one version of each package for every Python, and one that this Python can have."""

from importlib.metadata import PackageNotFoundError, metadata

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from places import ROOT

PINS = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")


def pins_for(python: str) -> list[Requirement]:
    return [pin for pin in PINS if pin.marker is None or pin.marker.evaluate({"python_version": python})]


@pytest.mark.parametrize("python", PYTHONS)
def test_each_package_has_one_version_for_each_python(python):
    assert sorted(pin.name for pin in pins_for(python)) == sorted({pin.name for pin in PINS})


@pytest.mark.parametrize("python", PYTHONS)
def test_no_pinned_version_refuses_this_python(python):
    """As far as installed packages say: pip would end the set-up because it finds no version."""
    refused = [str(pin) for pin in pins_for(python) if not _allowed(pin, python)]
    assert not refused


def _allowed(pin: Requirement, python: str) -> bool:
    """Whether the pinned version may be installed with this Python, if it is the installed version."""
    try:
        installed = metadata(pin.name)
    except PackageNotFoundError:
        return True
    if str(installed["Version"]) not in pin.specifier:
        return True
    return SpecifierSet(installed["Requires-Python"] or "").contains(f"{python}.9")
