"""What of a checkout's script needs no file of the training."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from megatron_ext.megatron import releases
from megatron_ext.megatron.describe_model import size_without_tokenizer


def test_a_tokenizer_that_cannot_be_read_has_the_size_that_is_given(megatron_tree, monkeypatch, capsys):
    def build(args):
        if args.tokenizer_type != "NullTokenizer":
            raise FileNotFoundError("vocab.json")
        return args.vocab_size + releases.null_tokenizer_adds()

    script = ModuleType("megatron.training.global_vars")
    vars(script)["_build_tokenizer"] = build
    monkeypatch.setitem(sys.modules, "megatron.training", ModuleType("megatron.training"))
    monkeypatch.setitem(sys.modules, script.__name__, script)
    size_without_tokenizer()
    built = vars(script)["_build_tokenizer"]
    assert built(SimpleNamespace(tokenizer_type="GPT2BPETokenizer", vocab_size=50257)) == 50257
    assert "(vocab.json); the vocabulary size is --vocab-size 50257" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError):
        built(SimpleNamespace(tokenizer_type="GPT2BPETokenizer", vocab_size=None))
