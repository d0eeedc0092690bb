"""Values of parameters wait in host memory, and the device has its bytes back."""

import torch

from megatron_ext.runtime.parked import Parked


def test_a_parked_parameter_takes_one_element_and_gets_its_values_back():
    parked, parameter = Parked("cpu"), torch.nn.Parameter(torch.arange(12.0).view(3, 4))
    parked.park([parameter])
    parked.park([parameter])  # of a module around it
    assert parameter.shape == (3, 4) and parameter.untyped_storage().nbytes() == 4
    assert parameter.expand_as(parameter).isnan().all(), "read by mistake it spoils what is computed"
    parked.put(parameter, torch.arange(12.0).view(3, 4) + 1)
    assert torch.equal(parked.take(parameter), torch.arange(12.0).view(3, 4) + 1)


def test_what_lies_elsewhere_or_is_a_part_of_something_stays():
    part, other = torch.nn.Parameter(torch.ones(8)[:4]), torch.nn.Parameter(torch.ones(4))
    Parked("cpu").park([part])
    Parked("cuda").park([other])
    assert part.sum() == other.sum() == 4
    parked = Parked("cpu")
    parked.put(other, torch.zeros(4))
    assert parked.take(other).sum() == 0 == other.sum()
