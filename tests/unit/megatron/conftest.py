"""Releases from 0.18 on import kernels written for triton, which PyTorch for CPUs does not bring."""

from places import pinned_core

from megatron_ext.megatron import megatron_on_cpu

if not pinned_core().startswith("0.16."):
    megatron_on_cpu.import_kernels_without_triton()
