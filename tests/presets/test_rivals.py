"""What later papers' systems compute, on worked examples and against their formulas written out."""

import copy
import inspect
import math
from typing import get_args

import pytest
import small_models
import torch
from codec_zoo import gaussian
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from vqkv import DataError, calibrate, capacity, presets
from vqkv.codecs.affine import Clipped
from vqkv.codecs.channel_bits import ChannelBits, _greedy
from vqkv.codecs.grid import NonUniform, SignedGrid
from vqkv.codecs.pipeline import Chain
from vqkv.codecs.stage import codec_from_config
from vqkv.codecs.vector import HeadCodebooks
from vqkv.models.metrics import attention_metrics

HEADS, DIM = 2, 16
model = small_models.fixture("llama", "gpt2", "qwen2")


def metric(seed: int = 0) -> torch.Tensor:
    root = gaussian(HEADS, DIM, DIM, seed=seed)
    return root @ root.mT


def restored(codec, x):
    return codec.decode(codec.encode(x))


def test_attention_metrics_are_those_of_the_queries_that_the_model_reads_with(model):
    seen, tokens = {}, torch.randint(1, 200, (2, 24), generator=torch.Generator().manual_seed(0))

    def watch(module, query, key, value, *arguments, **more):
        seen[module.layer_idx] = query.double(), key.double(), value.double()
        return sdpa_attention_forward(module, query, key, value, *arguments, **more)

    AttentionInterface.register("test_rivals", watch)
    AttentionMaskInterface.register("test_rivals", sdpa_mask)
    watched = copy.deepcopy(model)
    watched.set_attn_implementation("test_rivals")
    with torch.no_grad():
        watched(tokens)
    before = model.config._attn_implementation
    metrics = attention_metrics(model, tokens)
    assert model.config._attn_implementation == before
    for layer, (queries, keys, values) in seen.items():
        share = queries.shape[1] // keys.shape[1]
        for head in range(keys.shape[1]):
            rows = queries[:, head * share : (head + 1) * share].reshape(-1, queries.shape[-1])
            moment = rows.T @ rows / len(rows)
            k, v = (x[:, head].reshape(-1, x.shape[-1]) for x in (keys, values))
            weights = torch.stack([key @ moment @ key for key in k])
            weighted = sum(w * torch.outer(x, x) for w, x in zip(weights / weights.mean(), v, strict=True)) / len(v)
            torch.testing.assert_close(metrics["key", layer][head], moment.float(), rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(metrics["value", layer][head], weighted.float(), rtol=1e-3, atol=1e-5)


def test_oscar_is_rotation_clip_and_two_bits():
    x, cost = gaussian(1, HEADS, 40, DIM), metric()
    codec = presets.oscar().key_codec(DIM)
    codec.weigh(cost)
    read = restored(codec.fit(x), x)
    hadamard = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(DIM)] for i in range(DIM)]) / DIM**0.5
    for head in range(HEADS):
        basis = torch.linalg.eigh(cost[head].double())[1].float() @ hadamard
        y = x[0, head] @ basis
        most = y.abs().sort(dim=-1).values[:, int(0.96 * DIM)].unsqueeze(-1)
        y = y.clamp(-most, most)
        low, step = y.amin(-1, keepdim=True), (y.amax(-1, keepdim=True) - y.amin(-1, keepdim=True)) / 3
        expected = (((y - low) / step).round() * step + low) @ basis.T
        wrong = (read[0, head] @ basis - expected @ basis).abs() > 0.1 * step  # a code at the edge may fall either way
        assert wrong.float().mean() < 0.01


def test_clipping_ends_at_a_share_of_the_magnitudes():
    x = torch.tensor([-9.0, -1.0, 0.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]).view(1, 1, 1, 10)
    ends = Clipped(0.8).encode(x)[1]  # magnitudes 0.5, 1 ... 9: the ninth is 8
    assert ends["low"].item() == -8 and ends["high"].item() == 8
    assert Clipped(1.0).encode(x)[1]["low"].item() == -9


def test_block_gtq_gives_both_channels_of_a_frequency_the_bits_of_four_to_whose_power_most_is_left():
    assert _greedy(torch.tensor([16.0, 4.0, 1.0, 1.0]), 8).tolist() == [4, 2, 1, 1]
    assert _greedy(torch.tensor([1.0, 0.0]), 99).tolist() == [8, 8]
    x = gaussian(1, HEADS, 50, DIM) * torch.linspace(0.1, 3, DIM)
    codec = ChannelBits(2.5, pairs=True)
    chain = Chain([], codec, DIM)
    chain.weigh(metric())
    read = restored(chain.fit(x), x)
    widths = codec.widths.long()
    assert torch.equal(widths[:, : DIM // 2], widths[:, DIM // 2 :]) and widths.float().mean() == 2.5
    energy = (x.square().mean((0, 2)) + metric().diagonal(dim1=1, dim2=2)).unflatten(1, (2, -1)).sum(1)
    for head in range(HEADS):
        assert torch.equal(widths[head, : DIM // 2], _greedy(energy[head], 20))
        for width in widths[head].unique():  # norms are kept
            channels = widths[head] == width
            sizes = [y[0, head, :, channels].norm(dim=-1) for y in (read, x)]
            torch.testing.assert_close(*sizes, rtol=2e-3, atol=1e-3)
    sets = sum(len(head.unique()) for head in widths)
    assert 8 * chain.encode(x).nbytes / x.numel() == 2.5 + 16 * sets / (HEADS * DIM)
    with pytest.raises(DataError, match="even number"):
        Chain([], ChannelBits(2.0, pairs=True), 5)


def test_outlier_channels_have_one_bit_more():
    x = gaussian(1, HEADS, 50, DIM)
    x[:, 0, :, 3] *= 30
    x[:, 1, :, [5, 6, 7, 8]] *= 30
    chain = presets.turboquant(2.25).key_codec(DIM).fit(x)
    widths = chain.quantizer.widths
    assert widths.sum(1).tolist() == [36, 36] and widths[0, 3] == 3 and widths[1, 5:9].tolist() == [3] * 4
    again = codec_from_config(chain.config(), chain.state_dict())
    assert torch.equal(again.decode(again.encode(x)), restored(chain, x))
    assert presets.turboquant(2).key_codec(DIM).fit(x).encode(x).nbytes * 8 / x.numel() == 2 + 16 / DIM


def test_nova_has_codes_of_its_own_for_each_group_of_each_head():
    x = gaussian(1, HEADS, 700, DIM)
    codec = HeadCodebooks()
    chain = presets.nova().key_codec(DIM)
    chain.weigh(metric())
    assert chain.fit(x).quantizer.codebooks.shape == (HEADS, DIM // 4, 256, 4)
    rows = gaussian(1, HEADS, 700, 3, 4)
    codec.build((HEADS, 3, 4))
    codec.partial_fit(rows)
    codes, _ = codec.encode(rows)
    books = codec.codebooks.view(torch.float8_e5m2).float() * codec.scale.float()[..., None, None]
    for head, group in ((0, 0), (1, 2)):
        distances = torch.cdist(rows[0, head, :, group], books[head, group])
        assert torch.equal(codes[0, head, :, group], distances.argmin(-1))
    assert 8 * chain.encode(x).nbytes / x.numel() == 2 + 16 / DIM


def test_signs_and_magnitudes_of_eight_values():
    grid, x = Chain([], SignedGrid()), gaussian(1, HEADS, 500, DIM)
    read = restored(grid.fit(x), x)
    assert torch.equal(restored(grid, -x), -read) and torch.equal(read.sign(), x.sign())
    assert (read - x).square().mean() < 0.1175  # the best four levels of a Gaussian leave 0.1175
    assert 8 * grid.encode(x).nbytes / x.numel() == 2


def test_q_norm_keeps_mean_and_deviation():
    x = gaussian(1, 1, 4000, DIM).exp()
    plain, normed = (restored(Chain([], NonUniform(2, norm=norm)).fit(x), x) for norm in (False, True))
    assert math.isclose(normed.std(), x.std(), rel_tol=0.02) and math.isclose(normed.mean(), x.mean(), rel_tol=0.02)
    assert plain.std() < 0.97 * x.std()


def test_capacity_weighs_the_norms_that_each_codec_learned(llama):
    tokens = torch.randint(1, 200, (8, 48), generator=torch.Generator().manual_seed(0))
    compressor = calibrate(llama, tokens, presets.block_gtq(2, 2), progress=False)
    cache = compressor.new_cache(llama)
    llama(tokens[:1], past_key_values=cache)
    assert capacity(llama, compressor, memory_gb=1).bits_per_value == pytest.approx(cache.report().bits_per_value)


@pytest.mark.parametrize("name", presets.PRESETS)
def test_arguments_of_another_type_are_named(name):
    make = presets.PRESETS[name]
    for argument, about in inspect.signature(make).parameters.items():
        numbers = {int, float} & set(get_args(about.annotation) or [about.annotation])
        for value in ["2", [2], math.nan, math.inf, *([True] if bool not in get_args(about.annotation) else [])]:
            if numbers and about.annotation is not bool:
                with pytest.raises(DataError, match=f"argument {argument} of preset '{name}' must be"):
                    make(**{argument: value})
