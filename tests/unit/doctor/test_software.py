"""Versions, and what they mean."""

import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_ext.doctor import software
from megatron_ext.doctor.place import DoctorOptions, Place
from megatron_ext.runtime.routes import symmetric_gather


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
    assert "nvidia-smi" in found()["cuda"].advice
    assert found(DoctorOptions(out="", device="cpu"))["cuda"].status == "could not try"


def test_a_driver_that_is_older_than_the_build_is_said_where_torch_sees_no_device(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr("megatron_ext.doctor.software.ctypes.CDLL", lambda name: Driver(12080))
    finding = found()["cuda"]
    assert finding.status == "fail" and "the driver is for 12.8" in finding.found and "too old" in finding.advice


def test_bindings_count_where_they_import_without_their_distribution(monkeypatch, tmp_path):
    known = software.version
    monkeypatch.setattr(software, "version", lambda name: None if name == "cuda-bindings" else known(name))
    with monkeypatch.context() as patch:
        patch.setattr(software, "find_spec", lambda name: None)
        assert found()["cuda-bindings"].status != "pass"
    (tmp_path / "cuda" / "bindings").mkdir(parents=True)
    (tmp_path / "cuda" / "bindings" / "__init__.py").write_text("__version__ = '13.9'")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "cuda"]:
        monkeypatch.delitem(sys.modules, name)
    finding = found()["cuda-bindings"]
    assert (finding.status, finding.found) == ("pass", "13.9")
    for name in ("cuda.bindings", "cuda"):
        monkeypatch.delitem(sys.modules, name)


class Driver:
    """libcuda, as far as it is asked."""

    def __init__(self, version: int | None):
        self.version = version

    def cuDriverGetVersion(self, place):
        if self.version is None:
            return 999
        place._obj.value = self.version
        return 0


@pytest.fixture
def on_cuda(monkeypatch):
    """``on_cuda(driver, nccl)``: findings beside a device, of a torch built for CUDA 13, which has no private names."""

    def found_on(driver, nccl=(2, 27, 3)):
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch, "_C", SimpleNamespace())
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
        monkeypatch.setattr("megatron_ext.doctor.software.nccl.version", lambda: nccl)
        monkeypatch.setattr("megatron_ext.doctor.software.ctypes.CDLL", lambda name: driver)
        return found(on_cuda=True)

    return found_on


@pytest.mark.parametrize("version", [13000, None])
def test_the_driver_is_said_beside_its_device(on_cuda, version):
    finding = on_cuda(Driver(version))["cuda"]
    assert finding.status == "pass"
    assert (f"driver for {version // 1000}." if version else "does not report its version") in finding.found


def test_a_driver_without_the_function_and_an_nccl_with_a_word_behind_its_numbers(on_cuda):
    checks = on_cuda(object(), nccl=(2, 28, 9, "cuda13"))
    assert "does not report" in checks["cuda"].found and checks["nccl"].found == "2.28.9.cuda13"


def test_an_nccl_that_cannot_gather_by_copy_engines_is_said(on_cuda, monkeypatch):
    before = (2, 27, 7)
    monkeypatch.setattr(symmetric_gather.nccl, "version", lambda: before)
    assert symmetric_gather.missing("cuda", ranks=2, nodes=1)
    assert "no all-gathers by copy engines" in on_cuda(Driver(13000), nccl=before)["nccl"].found


def test_a_package_that_is_called_apex_is_not_taken_for_it(monkeypatch):
    present = {"apex"}
    monkeypatch.setattr(software, "find_spec", lambda name: name if name in present else None)
    assert found()["apex"].status == "fail" and "pip uninstall apex" in found()["apex"].advice
    present.add("amp_C")
    assert found()["apex"].status == "pass"
