"""The stand-in of Transformer Engine has what Megatron takes for its absence where it is not there."""

import sys
from unittest import mock

from megatron_ext.megatron import engine_modules


def test_what_megatron_imports_in_one_go_is_there():
    """Source: ``megatron/core/extensions/transformer_engine.py`` of core_v0.12.0 to core_v0.19.0."""
    with mock.patch.dict(sys.modules):
        engine_modules.install()
        from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, fp8_autocast, fp8_model_init

        assert not FP8GlobalStateManager.is_fp8_enabled()
        with fp8_autocast(enabled=False), fp8_model_init(enabled=False):
            pass
