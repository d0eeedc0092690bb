"""What Python lacks, for which Megatron does not ask, is there with a device as well."""

import typing

import torch

from megatron_ext.megatron import cpu_compat


def test_an_older_python_has_override_with_a_device_too(monkeypatch):
    """Megatron from 0.18 on imports it."""
    monkeypatch.delattr(typing, "override", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cpu_compat.install()
    assert typing.override(len) is len
