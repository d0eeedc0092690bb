"""Checkpoints that cannot be written or read are named in one line, and reading one runs no code."""

import fcntl
import itertools
import operator
import os
import pickle
import resource
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_ext.formats import directory_lock
from megatron_ext.formats.errors import InputError
from megatron_ext.megatron import cpu_compat

cpu_compat.install()

import checkpoint

OPTIMIZER = SimpleNamespace(chained_optimizers=[])


@pytest.fixture(autouse=True, scope="module")
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model(value: float, size: int = 4) -> list:
    module = torch.nn.Linear(size, size, bias=False)
    torch.nn.init.constant_(module.weight, value)
    return [SimpleNamespace(module=module)]


def rank_file(directory):
    return directory / "iter_0000007" / "rank_00000.pt"


@pytest.fixture
def saved(tmp_path):
    checkpoint.save(tmp_path, 7, model(3.0), OPTIMIZER)
    return tmp_path


def test_what_was_saved_comes_back_with_the_random_states(saved):
    drawn = torch.rand(3)
    torch.rand(5)
    loaded = model(0.0)
    assert checkpoint.load(saved, loaded, OPTIMIZER) == 7
    assert torch.equal(torch.rand(3), drawn)
    assert torch.equal(loaded[0].module.weight, torch.full((4, 4), 3.0))
    files = ["rank_00000.model_0.pt", "rank_00000.pt", "rank_00000.sha256"]
    assert sorted(os.listdir(saved / "iter_0000007")) == files


def flip(path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (flip, r"^\S+rank_00000.pt: --load: is damaged: its SHA-256 is not the one that was"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1000]), r"rank_00000.pt: --load: is damaged"),
        (lambda path: flip(path.with_suffix(".model_0.pt")), r"rank_00000.model_0.pt: --load: is damaged"),
        (lambda path: path.unlink(), r"rank_00000.pt: --load: cannot be read: rank_00000.pt: No such file"),
        (lambda path: path.with_suffix(".sha256").unlink(), r"cannot be read: rank_00000.sha256: No such file"),
        (lambda path: path.with_suffix(".sha256").write_bytes(b"\xba"), r"rank_00000.pt: --load: is damaged"),
        (lambda path: (path.parents[1] / checkpoint.LATEST).write_text("?"), r"there is no checkpoint"),
        (lambda path: (path.parents[1] / checkpoint.LATEST).write_text("9" * 300), r"there is no checkpoint"),
    ],
)
def test_a_damaged_checkpoint_is_named(saved, damage, said):
    damage(rank_file(saved))
    with pytest.raises(InputError, match=said):
        checkpoint.load(saved, model(0.0), OPTIMIZER)


def test_a_checkpoint_of_another_shape_is_refused(saved):
    with pytest.raises(InputError, match="was saved by a run of another shape"):
        checkpoint.load(saved, model(0.0, size=5), OPTIMIZER)


class Crafted:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_crafted_file_runs_no_code(saved):
    """By torch's own writer, and as a bare pickle; with the digest that its author would give it."""
    path, trace = rank_file(saved), saved / "code_ran"
    for write in (lambda: torch.save(Crafted(trace), path), lambda: path.write_bytes(pickle.dumps(Crafted(trace)))):
        write()
        path.with_suffix(".sha256").write_text(checkpoint.file_digest(path))
        with pytest.raises(InputError, match="is not a checkpoint of this example"):
            checkpoint.load(saved, model(0.0), OPTIMIZER)
        assert not trace.exists()


@pytest.mark.parametrize("data", [b"", b"X", b"]h\x05.", b"PK\x05\x06" + bytes(18), b"\x80\xff."])
def test_a_made_up_file_with_its_digest_is_refused(saved, data):
    path = rank_file(saved)
    path.write_bytes(data)
    path.with_suffix(".sha256").write_text(checkpoint.file_digest(path))
    with pytest.raises(InputError, match="rank_00000.pt: --load: is not a checkpoint of this example: "):
        checkpoint.load(saved, model(0.0), OPTIMIZER)


def test_a_file_without_its_iteration_is_refused(saved):
    path = rank_file(saved)
    state = torch.load(path, weights_only=True)
    del state["iteration"]
    torch.save(state, path)
    path.with_suffix(".sha256").write_text(checkpoint.file_digest(path))
    with pytest.raises(InputError, match="was saved by a run of another shape: 'iteration'"):
        checkpoint.load(saved, model(0.0), OPTIMIZER)


def test_made_up_random_states_are_refused(saved):
    path = rank_file(saved)
    state = torch.load(path, weights_only=True)
    (version, words, gauss), *others = state["rng"]
    for rng in ((version, (-1, *words[1:]), gauss), None):
        torch.save({**state, "rng": (rng, *others)}, path)
        path.with_suffix(".sha256").write_text(checkpoint.file_digest(path))
        with pytest.raises(InputError, match="was saved by a run of another shape"):
            checkpoint.load(saved, model(0.0), OPTIMIZER)


def test_a_write_that_fails_names_the_file_and_leaves_the_last_checkpoint(saved):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(
            InputError, match=r"iter_0000008/rank_00000.model_0.pt: --save: cannot be written: File too large$"
        ):
            checkpoint.save(saved, 8, model(1.0, size=64), OPTIMIZER)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(os.listdir(saved)) == ["iter_0000007", checkpoint.LATEST]
    assert checkpoint.load(saved, model(0.0), OPTIMIZER) == 7


def test_a_directory_is_one_job_s_at_a_time(saved):
    (saved / "iter_0000009.tmp").mkdir()
    (saved / "iter_0000009.tmp" / "rank_00003.pt").write_text("left by a killed job")
    with open(saved / directory_lock.NAME, "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="--save = .*: is in use by process"):
            checkpoint.claim(saved)
    checkpoint.claim(saved)
    assert not list(saved.glob("*.tmp"))


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="--save = .*: cannot be written: Not a directory"):
        checkpoint.claim(tmp_path / "file" / "c")


def test_a_checkpoint_that_replaces_another_is_whole_whatever_ends_the_process(saved, monkeypatch):
    """Ended at every call that changes the directory, in turn: what loads is the old one or the new one."""

    class Killed(BaseException):
        pass

    changes, loaded = 0, set()
    names = ("os.rename", "os.replace", "os.mkdir", "os.fsync", "os.unlink", "os.rmdir")

    def counted(call):
        def run(*args, **kwargs):
            nonlocal changes
            changes -= 1
            if changes == 0:
                raise Killed
            return call(*args, **kwargs)

        return run

    for last in itertools.count(1):
        torch.manual_seed(last)
        value, changes = float(last), last
        with monkeypatch.context() as patches:
            for name in names:
                patches.setattr(name, counted(operator.attrgetter(name.removeprefix("os."))(os)))
            try:
                checkpoint.save(saved, 7, model(value), OPTIMIZER)
                break
            except Killed:
                pass
        found = model(0.0)
        assert checkpoint.load(saved, found, OPTIMIZER) == 7
        loaded.add(found[0].module.weight[0, 0].item())
        checkpoint.claim(saved)
        assert not [name for name in os.listdir(saved) if name.endswith((".tmp", ".old"))]
        assert checkpoint.load(saved, found, OPTIMIZER) == 7
    assert last > 8 and {3.0, value - 1} <= loaded
