"""Versions, and what they mean."""

from types import SimpleNamespace

import pytest
import torch

from megatron_ext.doctor import software
from megatron_ext.doctor.place import DoctorOptions, Place


def here(on_cuda: bool = False) -> Place:
    # No torch.device: where another test has made torch.cuda speak of the CPU, it would be the CPU.
    device = SimpleNamespace(type="cuda" if on_cuda else "cpu", index=0)
    return Place(0, 1, 0, 1, device, lambda value: [value], None)


OPTIONS = DoctorOptions(out="")


def found(options=OPTIONS, on_cuda: bool = False) -> dict:
    return {finding.check: finding for finding in software.check(here(on_cuda), options)}


@pytest.mark.parametrize(
    ("text", "numbers"), [("2.13.0+cpu", (2, 13)), ("2.10.0a0+nv", (2, 10)), ("6.18.44-fc", (6, 18)), ("13", (13,))]
)
def test_the_first_numbers_of_a_version(text, numbers):
    assert software.numbers(text) == numbers


def test_what_is_here_passes():
    assert found()["python"].status == found()["torch"].status == "pass"


@pytest.mark.parametrize(("version", "status"), [("2.5.1", "fail"), ("2.6.0", "pass"), ("2.10.0a0+nv", "pass")])
def test_a_torch_that_is_too_old_fails(monkeypatch, version, status):
    monkeypatch.setattr(torch, "__version__", version)
    assert found()["torch"].status == status


def test_a_cuda_build_that_sees_no_device_fails_unless_the_cpu_is_asked_for(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert found()["cuda"].status == "fail" and "13.0" in found()["cuda"].found
    assert found(DoctorOptions(out="", device="cpu"))["cuda"].status == "could not try"


@pytest.mark.parametrize(("driver", "status"), [(12080, "fail"), (13000, "pass")])
def test_a_driver_older_than_the_build_fails(monkeypatch, driver, status):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: driver, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    monkeypatch.setattr("megatron_ext.doctor.software.nccl.version", lambda: (2, 27, 3))
    assert found(on_cuda=True)["cuda"].status == status


def test_a_package_that_is_called_apex_is_not_taken_for_it(monkeypatch):
    present = {"apex"}
    monkeypatch.setattr(software, "find_spec", lambda name: name if name in present else None)
    assert found()["apex"].status == "fail" and "pip uninstall apex" in found()["apex"].advice
    present.add("amp_C")
    assert found()["apex"].status == "pass"
