"""A stand-in for the part of the package mamba-ssm that a description of Megatron's Mamba layers needs: one module with
a parameter. The package's kernels need a GPU, so a laptop does not have it. Training never uses this stand-in.

Source: mamba v2.2, ``mamba_ssm/ops/triton/layernorm_gated.py``: ``RMSNorm`` registers ``weight`` alone.
"""

import importlib.util
import sys

import torch

from megatron_ext.megatron.engine_modules import make_packages

KERNELS = ("mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined")


class GatedRMSNorm(torch.nn.Module):
    """The norm after a state-space mixer, multiplied by a gate: ``weight`` of shape (hidden,)."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, group_size=None, norm_before_gate=True, **factory):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, **factory))
        self.eps, self.group_size, self.norm_before_gate = eps, group_size, norm_before_gate


def no_kernel(*arguments, **options):
    """Stands in for a kernel, which a description does not call."""
    raise RuntimeError("the kernels of mamba-ssm need a GPU")


def install() -> None:
    """Let ``import mamba_ssm`` find the stand-in if the package is not installed. Call before Megatron is imported."""
    if importlib.util.find_spec("mamba_ssm") is not None:
        return
    inner = ("", ".ops", ".ops.triton", ".ops.triton.layernorm_gated", ".ops.triton.ssd_combined")
    make_packages(f"mamba_ssm{name}" for name in inner)
    vars(sys.modules["mamba_ssm.ops.triton.layernorm_gated"])["RMSNorm"] = GatedRMSNorm
    vars(sys.modules["mamba_ssm.ops.triton.ssd_combined"]).update(dict.fromkeys(KERNELS, no_kernel))
