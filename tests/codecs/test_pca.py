"""Principal components: uncorrelated channels, undone exactly; errors that cost alike where it knows what they cost."""

import copy
import json

import pytest
import torch
from codec_zoo import gaussian, same

from vqkv.codecs.entropy_coded_scalar import EntropyCodedScalar, TrellisCodedScalar
from vqkv.codecs.groups import ComponentGroups
from vqkv.codecs.layout import MergeHeads, TokenBlock
from vqkv.codecs.pca import PCA
from vqkv.codecs.pipeline import Chain
from vqkv.codecs.scaling import MeanRemoval
from vqkv.codecs.stage import codec_from_config

HEADS, WIDTH = 3, 8
MERGED = pytest.mark.parametrize("before", [(), (MergeHeads(),)], ids=["per head", "merged"])


def mixed(tokens, seed=0, batch=1):
    """Channels that depend on each other, otherwise in every head; most of the variance in a few directions."""
    mixing = gaussian(HEADS, WIDTH, WIDTH, seed=100) * 2.0 ** -torch.arange(WIDTH)
    return gaussian(batch, HEADS, tokens, WIDTH, seed=seed) @ mixing.mT


def metric(seed=7):
    """(heads, channels, channels), symmetric: what errors cost."""
    root = gaussian(HEADS, WIDTH, WIDTH, seed=seed) * 3.0 ** -torch.arange(WIDTH)
    return root @ root.mT


def chain(*before, weighted=False, bits=2.0):
    codec = Chain([*before, PCA(weighted), TokenBlock(4)], EntropyCodedScalar(bits))
    if weighted:
        codec.weigh(metric())
    return codec


def fitted_in_batches(codec, x):
    for _ in range(codec.passes):
        for batch in x.split(100, dim=2):
            codec.partial_fit(batch)
        codec.end_pass()
    return codec.finalize()


@MERGED
@pytest.mark.parametrize("weighted", [False, True])
def test_channels_are_uncorrelated_and_come_back(before, weighted):
    x = mixed(400)
    codec = chain(*before, weighted=weighted).fit(x)
    y = codec.vectors(x).flatten(2, 3)  # blocks of tokens
    moment = (y.mT @ y)[0] / y.shape[2]
    size = moment.diagonal(dim1=1, dim2=2).sqrt()
    correlations = moment / (size.unsqueeze(1) * size.unsqueeze(2))
    strong = (size > 1e-2 * size.amax(1, keepdim=True)).float()  # the matrix is rounded to fp16
    both = strong.unsqueeze(1) * strong.unsqueeze(2) * (1 - torch.eye(len(size[0])))
    assert both.sum() > 6 and (correlations.abs() * both).max() < 0.1
    assert (size[:, 0] > size[:, -1]).all()
    stage, rows = codec.stages[len(before)], x
    for earlier in before:
        rows, _ = earlier.encode(rows)
    assert (stage.decode(stage.encode(rows)[0], {}) - rows).abs().max() < 1e-4 * rows.abs().max()
    assert tuple(stage.matrix.shape) == ((1, 24, 24) if before else (HEADS, WIDTH, WIDTH))


def test_the_weighted_error_is_what_the_quantizer_sees_and_loaded_it_needs_no_metric():
    x = mixed(400)
    codec = chain(weighted=True).fit(x)
    restored = codec.decode(codec.encode(x))
    error = (restored - x)[0].double()
    cost = ((error @ metric().double()) * error).sum()
    quantized = (codec.vectors(restored) - codec.vectors(x)).double().square().sum()
    mean = torch.linalg.eigvalsh(metric().double()).mean()  # the scale is arbitrary; rare directions cost a little more
    assert 0.98 < quantized * mean / cost < 1.4
    loaded = codec_from_config(json.loads(json.dumps(codec.config())), dict(codec.state_dict()))
    assert same(loaded.encode(x), codec.encode(x))


def test_means_are_known_before_components():
    """Channels of a mean far from 0, which two batches differ in: what is stored is centred all the same."""
    x, codec = mixed(200) + 10.0, chain(MeanRemoval())
    x[:, :, 100:] += 5.0
    assert codec.passes == 3
    at_once = chain(MeanRemoval()).fit(x)
    torch.testing.assert_close(fitted_in_batches(codec, x).vectors(x), at_once.vectors(x), atol=1e-2, rtol=0)


def test_zeros_and_one_token_again_and_again_leave_an_orthonormal_matrix():
    for x in (mixed(40) * 0, mixed(4)[:, :, :1].expand(-1, -1, 8, -1)):
        codec = chain().fit(x)
        matrix = codec.stages[0].matrix.float()
        torch.testing.assert_close(matrix @ matrix.mT, torch.eye(WIDTH).expand_as(matrix), atol=2e-3, rtol=0)
        assert codec.decode(codec.encode(x)).isfinite().all()


def test_of_fewer_components_comes_the_value_whose_error_costs_least():
    """Not the shortest such value, which would change what costs much to save what costs nothing."""
    x = gaussian(1, 1, 512, 12) * 1.5 ** -torch.arange(12)  # what varies most costs least
    root = gaussian(1, 12, 12, seed=1) * 1.3 ** torch.arange(12).unsqueeze(1)
    costs = root @ root.mT
    stage = PCA(weighted=True, rank=5)
    stage.build((1, 12))
    stage.weigh(costs)
    stage.partial_fit(x)
    stage.settle()
    coded = stage.encode(x)[0]

    def cost(restored):
        error = (x - restored)[0, 0]
        return float((error @ costs * error).sum())

    values, vectors = torch.linalg.eigh(costs)
    scale = vectors @ values.sqrt().diag_embed() @ vectors.mT
    left_out = float(torch.linalg.svdvals((x[0] @ scale)[0])[5:].square().sum())  # Eckart and Young 1936
    assert cost(stage.decode(coded, {})) == pytest.approx(left_out, rel=0.01)
    assert cost(coded @ torch.linalg.pinv(stage.matrix.float())) > 1.2 * left_out


@pytest.mark.parametrize("quantizer", [ComponentGroups(2.0), EntropyCodedScalar(2.0), TrellisCodedScalar(2.0)])
@pytest.mark.parametrize("rank", [0, 32])
def test_bits_are_a_values_whatever_the_rank(quantizer, rank):
    x = gaussian(1, 1, 2048, 64) * 2.0 ** -torch.arange(0, 16, 0.25)
    codec = Chain([PCA(rank=rank), TokenBlock(64)], copy.deepcopy(quantizer)).fit(x)
    assert 8 * codec.encode(x).nbytes / x.numel() == pytest.approx(2, rel=0.12)
