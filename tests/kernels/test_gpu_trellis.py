"""Triton's trellis against the naive twin, in its interpreter without a GPU."""

import pytest
import torch
from test_trellis import costs, spent
from views import DEVICE, amid, gaussian

from vqkv.kernels import naive
from vqkv.kernels.trellis.code import LARGEST, TRANSITIONS
from vqkv.kernels.trellis.triton import ROWS, trellis_decode, trellis_encode

ODD = [0.0, float("nan"), -3e38, 2.0 * LARGEST]  # one in each row


@pytest.mark.parametrize("states", TRANSITIONS)
@pytest.mark.parametrize("channels", [1, 11])
def test_paths_are_as_good_and_read_back_alike(states, channels, guarded):
    x = 2 * gaussian(len(ODD), channels, seed=1)
    x[:, channels // 2] = torch.tensor(ODD)
    bits, tables = costs(3), torch.arange(channels, dtype=torch.int32) % 3
    shifts = torch.arange(channels, dtype=torch.int32) % 4
    arguments = bits, tables, shifts
    codes = trellis_encode(amid(x), *(amid(part.to(DEVICE)) for part in arguments), 0.3, states).cpu()
    read_back_alike(codes, states)
    expected = naive.trellis_encode(x.cpu(), *arguments, 0.3, states)
    assert torch.allclose(*(spent(x.cpu(), each, *arguments, 0.3, states) for each in (codes, expected)), rtol=1e-5)


@pytest.mark.parametrize("states", TRANSITIONS)
def test_more_rows_than_a_program_decodes(states, guarded):
    read_back_alike((9 * gaussian(ROWS + 2, 5, seed=1)).round().int().cpu(), states)


def read_back_alike(codes, states: int) -> None:
    step = torch.tensor(0.25)
    values = trellis_decode(amid(codes.to(DEVICE)), step.to(DEVICE), states).cpu()
    assert torch.equal(values, naive.trellis_decode(codes, step, states))
