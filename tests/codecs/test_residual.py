"""Residual VQ: the fast kernels against brute force in float64, and learning."""

import pytest
import torch
from strategies import gaussian

from vqkv.codecs.residual import ResidualVQ
from vqkv.kernels import cpu
from vqkv.kernels import naive as reference
from vqkv.kernels.rvq import loops
from vqkv.kernels.rvq.tables import prepare


def fitted(x, **settings):
    quantizer = ResidualVQ(**{"num_quantizers": 3, "codebook_size": 32, "group_size": x.shape[-1], **settings})
    quantizer.build((1, *x.shape[3:]))
    quantizer.partial_fit(x)
    return quantizer


def test_near_ties_that_fp32_cannot_tell_apart():
    """Vectors a hair off the middle between two codes far from the origin: fp32 scores are noise there."""
    codebook = torch.cat([torch.full((1, 16), 100.0), gaussian(98, 16), torch.full((1, 16), 101.0)])
    nudge = torch.linspace(-1e-5, 1e-5, 41).unsqueeze(-1)
    x = torch.full((41, 16), 100.5).double() + nudge
    codes = cpu.rvq_encode(x, codebook[None])
    assert torch.equal(codes, reference.rvq_encode(x, codebook[None]))
    assert sorted(codes.unique().tolist()) == [0, 99]
    scores = codebook.square().sum(-1) - 2 * x.float() @ codebook.T
    assert not torch.equal(scores.argmin(-1, keepdim=True), codes)  # plain fp32 does get them wrong


def test_ties_deep_in_the_residual():
    """The second stage must be decided on the exact residual, not on the one that fp32 carried along."""
    first = gaussian(70, 12) * 3000
    second = torch.cat([gaussian(35, 12, seed=1), -gaussian(35, 12, seed=1)])
    codebooks = torch.stack([first, second])
    x = first[:60].double() + 1e-5 * gaussian(60, 12, seed=3)  # between a code and its opposite
    assert torch.equal(cpu.rvq_encode(x, codebooks), reference.rvq_encode(x, codebooks))


def test_an_outlying_code_does_not_send_every_row_to_float64():
    assert 0 < loops.reach(-8.0, 4.0, 1e-7, 3000.0, 16) + 8 < 1e-3


@pytest.mark.parametrize("beam", [1, 3])
def test_reduced_precision_settings_do_not_reach_the_kernel(beam):
    x, codebooks = gaussian(500, 32), gaussian(2, 200, 32, seed=1)
    expected = cpu.rvq_encode(x, codebooks, beam)
    assert beam > 1 or torch.equal(expected, reference.rvq_encode(x, codebooks))
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(cpu.rvq_encode(x, codebooks, beam), expected)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_tables_notice_that_a_codebook_was_written_to():
    x, codebooks = gaussian(100, 8), gaussian(2, 16, 8, seed=1)
    before = prepare(codebooks)
    assert prepare(codebooks) is before and prepare(codebooks[:1]).codebooks.shape == (1, 16, 8)
    codebooks.neg_()
    assert torch.equal(cpu.rvq_encode(x, codebooks), reference.rvq_encode(x, codebooks))
    with torch.inference_mode():
        frozen = codebooks.clone()
        assert torch.equal(cpu.rvq_encode(x, frozen), reference.rvq_encode(x, frozen))


def test_revival_puts_dead_codes_to_use():
    x = gaussian(1, 1, 4000, 8)
    dead = {}
    for revive in (False, True):
        quantizer = fitted(x, decay=0.5, revive=revive)
        for _ in range(10):
            quantizer.partial_fit(x.abs() * 10)
        dead[revive] = int((quantizer.usage(x.abs() * 10) == 0).sum())
    assert dead[True] < dead[False]


def test_learning_is_deterministic():
    x = gaussian(1, 1, 2000, 8)
    runs = [fitted(x, seed=s) for s in (0, 0, 1)]
    for quantizer in runs:
        quantizer.partial_fit(x)
    assert torch.equal(runs[0].codebooks, runs[1].codebooks) and not torch.equal(runs[0].codebooks, runs[2].codebooks)


def test_a_vocabulary_of_vectors_does_not_run_later_stages_dry():
    """As a first layer's keys before RoPE, which repeat with their tokens: unseen vectors gain by each stage."""
    words = gaussian(1, 1, 100, 8)
    x = words[:, :, torch.randint(100, (2000,), generator=torch.Generator().manual_seed(1))]
    quantizer = fitted(x, num_quantizers=6)
    assert quantizer.loss(x)[-1] < 1e-2
    unseen = quantizer.loss(gaussian(1, 1, 500, 8, seed=2))
    assert (unseen[1:] <= unseen[:-1] * 1.001).all() and unseen[-1] < 0.8 * unseen[0]
