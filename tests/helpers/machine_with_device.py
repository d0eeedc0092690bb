"""Packages for PYTHONPATH that make this machine look like one with a GPU: torch sees a device, which nobody may use.

Counting devices is allowed; whatever initialises CUDA ends in an error, in the process and in those that it starts.
Transformer Engine and Apex are installed and cannot be imported.
"""

from pathlib import Path

SITE = """
import importlib.abc, importlib.machinery, os, sys

def shown():
    return int(os.environ.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1"))

def refuse(*args, **kwargs):
    raise RuntimeError("CUDA is initialised")

def change(torch):
    compiled = torch.cuda._is_compiled()
    torch.cuda._is_compiled = lambda: compiled
    torch._C._cuda_getDeviceCount = shown
    torch.cuda.device_count, torch.cuda.is_available = shown, lambda: shown() > 0
    torch.cuda.init = torch.cuda._lazy_init = refuse
    for module in (torch.cuda.memory, torch.cuda.random, torch.cuda.streams):
        module._lazy_init = refuse
    for name in "current_device get_device_name get_device_properties set_device current_stream synchronize".split():
        setattr(torch.cuda, name, refuse)

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            change(module)
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""

KERNELS = "raise RuntimeError('no CUDA device is visible')\n"


def write(folder: Path) -> str:
    """Write the packages and return what PYTHONPATH needs."""
    files = {"sitecustomize.py": SITE}
    for name in ("transformer_engine", "apex"):
        files |= {f"{name}/__init__.py": KERNELS, f"{name}-2.20.dist-info/METADATA": f"Name: {name}\nVersion: 2.20\n"}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return str(folder)
