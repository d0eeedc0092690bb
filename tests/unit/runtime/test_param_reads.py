"""Which calls of torch's use parameters, and what is done before the first of them. Needs no process group."""

import copy
import pickle

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack as modes
from torch.overrides import _pop_mode, _push_mode

from megatron_ext.runtime.param_reads import ParamReads


@pytest.fixture(autouse=True)
def no_other_modes():
    """Another test of this process may have entered the mode that lets Megatron train without a device."""
    before = [_pop_mode() for _ in modes()]
    yield
    for mode in reversed(before):
        _push_mode(mode)


@pytest.fixture
def whole():
    return torch.zeros(8)


@pytest.fixture
def parameters(whole):
    made = [torch.nn.Parameter(torch.empty(4)) for _ in range(2)]
    for index, parameter in enumerate(made):
        parameter.data = whole[4 * index : 4 * index + 4]
    return made


@pytest.fixture
def reads(whole):
    """Gathering adds one to all elements."""
    found = ParamReads(
        {whole.untyped_storage()._cdata}, lambda place, used: found.places.append(place) or whole.add_(1)
    )
    found.places = []
    yield found
    found.close()
    assert modes() == []


USES = {
    "an operation": lambda p, view: (p[0] * 1)[0].item(),
    "a list": lambda p, view: torch._foreach_mul(p, 1.0)[0][0].item(),
    "a view taken earlier": lambda p, view: view.sum().item() / 4,
    "a NumPy array": lambda p, view: p[0].detach().numpy()[0],
    "a kernel of an extension": lambda p, view: p[0].data[0].item(),
    "a copy": lambda p, view: copy.deepcopy(p[0])[0].item(),
    "text": lambda p, view: float(repr(p[0]).partition("tensor([")[2].partition(",")[0]),
    "a pickle": lambda p, view: pickle.loads(pickle.dumps(p[0]))[0].item(),
    "a write": lambda p, view: p[0].data.mul_(1)[0].item(),
    "an argument by name": lambda p, view: torch.add(input=p[0], other=0)[0].item(),
    "an average": lambda p, view: torch.zeros(4).lerp_(p[0], 1.0)[0].item(),
    "a module": lambda p, view: torch.nn.functional.linear(torch.ones(1, 4), view[None]).item() / 4,
}


@pytest.mark.parametrize("use", USES)
def test_a_use_finds_what_is_gathered_before_it(reads, parameters, use):
    view = parameters[0].data
    reads.open()
    value = USES[use](parameters, view)
    again = USES[use](parameters, view)
    assert len(reads.places) == 1 and reads.places[0].startswith(f"{__file__}:")
    assert value == again == 1


def test_what_has_no_value_of_a_parameter_gathers_nothing(reads, parameters):
    reads.open()
    for parameter in parameters:
        assert parameter.grad is None and parameter.requires_grad and parameter.is_leaf
        assert parameter.is_cuda in (True, False)  # a stand-in of another test may say either
        assert parameter.shape == (4,) and parameter.numel() == 4 and len(parameter) == 4 and parameter.dim() == 1
        assert parameter.dtype == torch.float32 and parameter.device.type == "cpu" and hash(parameter)
        parameter.grad = None
    torch.zeros(3).add_(1).sum().item()
    assert reads.places == []


def test_nothing_is_watched_within_an_iteration(reads, parameters):
    reads.open()
    reads.close()
    assert modes() == []
    parameters[0].sum()
    reads.open()
    with reads.suspended():
        assert modes() == []
        parameters[0].sum()
    assert modes() == [reads] and reads.places == []
    parameters[0].sum()
    assert len(reads.places) == 1
    reads.open()  # of the next step
    parameters[0].sum()
    assert len(reads.places) == 2


class Other(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("context", [Other, lambda: torch.device("cpu")])
@pytest.mark.parametrize("opens_within", [True, False])
def test_contexts_of_others_may_end_whenever_they_do(reads, parameters, context, opens_within):
    """Leaving a context takes the topmost mode off, whosever it is."""
    if not opens_within:
        reads.open()
    with context():
        if opens_within:
            reads.open()
        else:
            reads.close()
            reads.open()
    assert modes() == [reads]
    parameters[0].sum()
    assert len(reads.places) == 1


def test_the_default_device_may_change_meanwhile(reads):
    torch.set_default_device("cpu")
    reads.open()
    torch.set_default_device("meta")
    assert torch.zeros(1).is_meta
    torch.set_default_device(None)
    assert modes() == [reads] and torch.zeros(1).device.type == "cpu"
