"""Releases from 0.18 on import kernels written for triton, which PyTorch for CPUs does not bring."""

from places import pinned_core

from megatron_ext.megatron import cpu_compat

if not pinned_core().startswith("0.16."):
    cpu_compat.import_kernels_without_triton()
