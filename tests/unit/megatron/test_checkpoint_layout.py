"""A checkpoint of other expert-parallel sizes, or of other groups, is refused before Megatron loads it."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron.checkpoint_layout import GROUPS, refuse_other_experts, refuse_other_groups

SIZES = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """``saved(form, **sizes)``: this run has :data:`SIZES` and loads what was saved so; returns its arguments."""
    folder = tmp_path / "iter_0000012"
    (folder / "mp_rank_00_000").mkdir(parents=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12\n")
    args = SimpleNamespace(load=str(tmp_path), **SIZES)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", SimpleNamespace(_GLOBAL_ARGS=args))

    def save(form: str | None, **sizes):
        content = {"args": SimpleNamespace(**(SIZES | sizes)), "weight": torch.ones(3)}
        if form is None:
            torch.save(content, folder / "mp_rank_00_000" / "model_optim_rng.pt")
        else:
            said = {"content_metadata": {"distrib_optim_sharding_type": form}} if form else {}  # before 0.13 nothing
            torch.save(content | said, folder / "common.pt")
            backend = '{"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", '
            (folder / "metadata.json").write_text(backend + '"common_backend_version": 1}')
        return args

    return save


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("form", [None, "dp_reshardable"])
def test_experts_that_were_spread_otherwise_are_refused(saved, form, name):
    saved(form, **{name: 4})
    with pytest.raises(InputError) as refused:
        refuse_other_experts(7)
    text = str(refused.value)
    assert text.startswith(f"--{name.replace('_', '-')} = {SIZES[name]}: ") and "was saved with 4" in text
    assert "groups[7]" in text and "--dist-ckpt-optim-fully-reshardable" in text


@pytest.mark.parametrize("form", [None, "dp_reshardable"])
def test_what_is_as_it_was_is_loaded(saved, form):
    saved(form)
    refuse_other_experts(7)


def test_what_can_be_spread_anew_is_loaded(saved):
    saved("fully_reshardable", expert_model_parallel_size=4)
    refuse_other_experts(7)


def test_parameters_alone_can_be_spread_anew(saved):
    saved("dp_reshardable", expert_model_parallel_size=4).no_load_optim = True
    refuse_other_experts(7)


def test_what_cannot_be_read_is_left_to_megatron(saved):
    saved(None, expert_model_parallel_size=4).load += "/elsewhere"
    refuse_other_experts(7)


def groups(*names: str) -> list[SimpleNamespace]:
    return [SimpleNamespace(pp_rank=0, model_chunk_id=0, parameters=tuple(own)) for own in names]


@pytest.fixture
def layout(saved) -> str:
    """What a run with groups ``ab`` and ``cd`` saves of them."""
    args = saved(None)
    refuse_other_groups(groups("ab", "cd"), in_order=True)
    return getattr(args, GROUPS)


@pytest.mark.parametrize("form", [None, "dp_reshardable"])
@pytest.mark.parametrize("other", [("ac", "bd"), ("ba", "cd"), ("abcd",)])
def test_states_of_other_groups_are_refused(saved, layout, form, other):
    saved(form, **{GROUPS: layout})
    with pytest.raises(InputError, match="^--load = .*optimizer states by bucket"):
        refuse_other_groups(groups(*other), in_order=True)


@pytest.mark.parametrize("elsewhere", [None, "apart"])
def test_states_of_a_checkpoint_that_is_not_persistent_are_refused_if_it_is_as_new(saved, layout, elsewhere):
    args = saved("dp_reshardable", **{GROUPS: layout})
    load, place = Path(args.load), Path(args.load) / (elsewhere or "non_persistent")
    args.non_persistent_ckpt_type, args.non_persistent_global_ckpt_dir = "global", elsewhere and place
    place.mkdir()
    for name in ("iter_0000012", "latest_checkpointed_iteration.txt"):
        (load / name).rename(place / name)
    if elsewhere:
        (load / "latest_checkpointed_iteration.txt").write_text("release\n")
    with pytest.raises(InputError, match="optimizer states by bucket"):
        refuse_other_groups(groups("ac", "bd"), in_order=True)
    (load / "latest_checkpointed_iteration.txt").write_text("13\n")
    refuse_other_groups(groups("ac", "bd"), in_order=True)


@pytest.mark.parametrize("form", [None, "dp_reshardable"])
def test_the_same_groups_in_another_order_are_loaded(saved, layout, form):
    saved(form, **{GROUPS: layout})
    refuse_other_groups(groups("cd", "ab"), in_order=True)


@pytest.mark.parametrize("how", ["no_load_optim", "finetune"])
def test_parameters_alone_are_loaded_into_other_groups(saved, layout, how):
    setattr(saved(None, **{GROUPS: layout}), how, True)
    refuse_other_groups(groups("ac", "bd"), in_order=True)


def test_states_of_each_parameter_are_loaded_into_other_groups(saved, layout):
    saved("fully_reshardable", **{GROUPS: layout})
    refuse_other_groups(groups("ac", "bd"), in_order=True)


def test_states_of_each_parameter_that_0_12_wrote_are_loaded_into_other_groups(saved, layout):
    saved("", **{GROUPS: layout}, ckpt_fully_parallel_save=True)
    refuse_other_groups(groups("ac", "bd"), in_order=True)
    saved("", **{GROUPS: layout}, ckpt_fully_parallel_save=False)
    with pytest.raises(InputError, match="optimizer states by bucket"):
        refuse_other_groups(groups("ac", "bd"), in_order=True)


def test_a_checkpoint_that_does_not_say_its_groups_is_loaded_into_groups_in_order(saved):
    saved(None)
    refuse_other_groups(groups("ab", "cd"), in_order=True)
    with pytest.raises(InputError, match="optimizer states by bucket"):
        refuse_other_groups(groups("ac", "bd"), in_order=False)
    saved(None).no_load_optim = True
    refuse_other_groups(groups("ac", "bd"), in_order=False)


def test_a_format_that_megatron_alone_knows_is_left_to_megatron(saved, layout):
    args = saved("dp_reshardable", **{GROUPS: layout})
    with pytest.raises(InputError, match="optimizer states by bucket"):
        refuse_other_groups(groups("ac", "bd"), in_order=True)
    (Path(args.load) / "iter_0000012" / "metadata.json").write_text('{"sharded_backend": "other"}')
    refuse_other_groups(groups("ac", "bd"), in_order=True)
