"""Odd shapes, extreme values and altered settings of every codec: an answer, or an error saying why."""

import copy
import resource
from functools import cache, partial

import pytest
import torch
from codec_zoo import gaussian, same
from preset_zoo import EVERY

from vqkv import DataError, FormatError, presets
from vqkv.cache.snapshots import SnapshotReader, SnapshotWriter
from vqkv.codecs import (
    Chain,
    ChannelScale,
    Fallback,
    Grouping,
    HalfQuadratic,
    NonUniform,
    ProductVQ,
    ResidualVQ,
    TokenBlock,
    Uniform,
    codec_from_config,
)


@cache
def fitted(name, role="key", head_dim=32):
    codec = getattr(EVERY[name], f"{role}_codec")(head_dim)
    return codec if codec.ready else codec.fit(gaussian(2, 2, 160, head_dim))


@pytest.mark.parametrize("role", ["key", "value"])
@pytest.mark.parametrize("name", EVERY)
def test_extreme_values_stay_finite_and_layout_does_not_matter(name, role):
    codec = fitted(name, role)
    x = gaussian(1, 2, 2 * codec.tokens_per_row, 32, seed=1)
    spike = x.clamp(-3, 3)
    spike[0, 0, 0, 0] = 6e4
    for bad in (x * 0, x * 0 + 3.3, x.clamp(-1, 1) * 6e4, x * 1e-30, x * 1e-42, spike):
        decoded = codec.decode(codec.encode(bad), torch.float16)
        assert decoded.shape == x.shape and decoded.isfinite().all()
    payload = codec.encode(x)
    assert same(codec.encode(x.transpose(1, 2).contiguous().transpose(1, 2)), payload)
    assert same(codec.encode(x.double()), payload)
    assert not codec.decode(codec.encode(x.clone().requires_grad_())).requires_grad
    with torch.inference_mode():
        assert same(codec.encode(x), payload)
    torch.set_num_threads(2)
    try:
        assert same(codec.encode(x), payload)
    finally:
        torch.set_num_threads(1)
    assert same(copy.deepcopy(codec).to("cpu").encode(x), payload)
    x[0, 1, 0, 3] = float("nan")
    for bad, message in ((x, "NaN or infinite"), (x[:0], "at least one token"), (x[..., :16], "made for 32")):
        with pytest.raises(DataError, match=message):
            codec.encode(bad)


@pytest.mark.parametrize("role", ["key", "value"])
@pytest.mark.parametrize("name", EVERY)
def test_magnitudes_beyond_fp16_are_refused_not_clipped(name, role):
    codec = fitted(name, role)
    x = gaussian(1, 2, 2 * codec.tokens_per_row, 32, seed=1)
    x[0, 1, -1, 3] = -65504.0
    assert codec.decode(codec.encode(x)).isfinite().all()
    x[0, 1, -1, 3] = -65600.0
    with pytest.raises(DataError, match="the largest magnitude 65600 overflows fp16 .65504.: scale the values first"):
        codec.encode(x)


@pytest.mark.parametrize("name", EVERY)
def test_the_default_dtype_changes_nothing(name):
    expected, x = fitted(name), gaussian(2, 2, 2 * fitted(name).tokens_per_row, 32, seed=1)
    train, payload = gaussian(2, 2, 160, 32), expected.encode(x)
    torch.set_default_dtype(torch.float64)
    try:
        codec = EVERY[name].key_codec(32)
        codec = codec if codec.ready else codec.fit(train)
        again = codec_from_config(codec.config(), codec.state_dict())
        assert same(codec.encode(x), payload) and same(again.encode(x), payload)
        decoded = again.decode(payload)
    finally:
        torch.set_default_dtype(torch.float32)
    assert decoded.dtype == torch.float32 and torch.equal(decoded, expected.decode(payload))


def test_random_starts_and_revived_codes_do_not_depend_on_the_default_dtype():
    found, batches = [], [gaussian(1, 1, 400, 8, seed=seed) for seed in range(3)]
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            codec = Chain([], ResidualVQ(2, 24, 8, init="random", revive=True), 8)
            for x in batches:
                codec.partial_fit(x)
            found.append(codec.finalize().quantizer.codebooks)
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(*found)


GROUPS = [  # channels, group_size -> the affine presets' groups, and HIGGS's
    *[(64, 64, 64, 64), (64, 128, 64, 64), (128, 64, 64, 64), (128, 1024, 128, 128), (256, 1024, 256, 256)],
    *[(96, 64, 48, 32), (80, 64, 40, 16), (20, 64, 20, 4), (40, 16, 10, 8), (5, 64, 5, 1), (12, 4, 4, 4)],
    *[(64, 7, None, 4), (67, 64, None, 1), (34, 16, None, 2), (1, 7, 1, 1), (768, 1000, 768, 256)],
]


@pytest.mark.parametrize(("channels", "group_size", "divisor", "power"), GROUPS)
def test_groups_shrink_to_what_divides_the_channels_or_say_what_does(channels, group_size, divisor, power):
    assert Grouping(group_size=group_size, shrink="power of two").build((2, channels)) == (2, channels // power, power)
    affine = Grouping(group_size=group_size, shrink="divisor")
    if divisor:
        assert affine.build((2, channels)) == (2, channels // divisor, divisor)
        return
    with pytest.raises(DataError, match=rf"head_dim {channels} is not divisible by group_size {group_size}: .*\[1, "):
        affine.build((2, channels))


def test_no_preset_spends_more_on_scales_than_asked():
    for make in (presets.quanto, presets.hqq):
        with pytest.raises(DataError, match="not divisible by group_size 7"):
            make(group_size=7).key_codec(64)
    codec = presets.quanto(4).key_codec(20).fit(gaussian(1, 1, 8, 20))
    assert codec.encode(gaussian(1, 1, 8, 20)).nbytes == 8 * (10 + 4)  # all 20 channels share two ends


@pytest.mark.parametrize("name", EVERY)
def test_a_mask_selects_the_sequences_that_it_marks(name):
    codec = fitted(name)
    payload = codec.encode(gaussian(3, 2, 2 * codec.tokens_per_row, 32, seed=4))
    for mask in (torch.tensor([False, False, True]), [False, True, True], torch.zeros(3, dtype=torch.bool)):
        index = torch.as_tensor(mask).nonzero().flatten()
        assert same(payload.batch_select(mask), payload.batch_select(index))
        assert payload.batch_select(mask).shape[0] == len(index)
    for wrong in ([True, False], torch.ones(4, dtype=torch.bool), torch.ones(3, 1, dtype=torch.bool)):
        with pytest.raises(DataError, match="for a batch of 3 sequences"):
            payload.batch_select(wrong)


@pytest.mark.parametrize("head_dim", [1, 20])
@pytest.mark.parametrize("name", EVERY)
def test_any_head_dim_is_stored_or_named(name, head_dim):
    try:
        codec = EVERY[name].key_codec(head_dim)
    except DataError as error:
        assert "divisi" in str(error) or "even number" in str(error)
        return
    codec = codec if codec.ready else codec.fit(gaussian(2, 2, 160, head_dim))
    x = gaussian(1, 2, codec.tokens_per_row, head_dim, seed=1)
    assert codec.decode(codec.encode(x)).sub(x).square().sum() < x.square().sum()


@pytest.mark.parametrize("name", [name for name in EVERY if name != "fp16"])
def test_the_order_of_calls_is_checked(name):
    make = partial(EVERY[name].key_codec, 32)
    with pytest.raises(RuntimeError, match="not fitted"):
        make().encode(gaussian(1, 2, 16, 32))
    with pytest.raises(RuntimeError, match="learned nothing"):
        make().finalize()
    with pytest.raises(RuntimeError, match="frozen"):
        copy.deepcopy(fitted(name)).fit(gaussian(1, 2, 16, 32))
    codec = make()
    for seed in range(3):
        codec.partial_fit(gaussian(1, 2, 70, 32, seed=seed))
    with pytest.raises(DataError, match="NaN"):
        codec.partial_fit(gaussian(1, 2, 70, 32) * float("nan"))
    x = gaussian(1, 2, codec.tokens_per_row, 32)
    assert codec.finalize().finalize().decode(codec.encode(x)).isfinite().all()


@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("name", EVERY)
def test_too_little_to_learn_from_is_named(name, tokens):
    codec = EVERY[name].key_codec(32)
    if codec.ready:
        return
    try:
        codec.fit(gaussian(1, 1, tokens, 32))
    except DataError as error:
        assert "distinct" in str(error) or "shorter than the codec's block" in str(error)


def test_no_codec_reads_what_another_wrote():
    payloads = {name: fitted(name).encode(gaussian(1, 2, 16, 32)) for name in EVERY}
    alike = [{"vqllm", "beam"}, {"quanto", "hqq"}, {"vqq", "vqq_product"}]  # the same fields of the same sizes
    for writer, payload in payloads.items():
        for reader in EVERY:
            if writer != reader and {writer, reader} not in alike:
                with pytest.raises(FormatError):
                    fitted(reader).decode(payload)


UNIFORM = {"part": "Uniform", "bits": 4}


def chain_of(*stages, quantizer=UNIFORM, head_dim=32, num_kv_heads=1):
    stages = [{"part": stage} if isinstance(stage, str) else stage for stage in stages]
    shape = {"head_dim": head_dim, "num_kv_heads": num_kv_heads}
    return {"part": "Chain", "stages": stages, "quantizer": quantizer, **shape}


def fallback(**settings):
    return chain_of(quantizer={"part": "Fallback", "inner": chain_of(head_dim=8)} | settings)


@pytest.mark.parametrize(
    "config",
    [
        *[chain_of(quantizer={"part": "Uniform", "bits": bits}) for bits in (16, -1, 0, float("nan"), "4", None)],
        *[chain_of({"part": "TokenBlock", "tokens": tokens}) for tokens in (10**9, 0, -1, 2.0)],
        *[fallback(threshold=threshold) for threshold in (float("nan"), -1, "x", None, [1])],
        *[fallback(block_size=size) for size in (16, "8", None, 10**30, 0, -8, 8.0, True)],
        *[fallback(inner=chain_of(head_dim=None), block_size=size) for size in (0, -8, True)],
        *[chain_of({"part": "SparseOutliers", "share": share}) for share in (0, 1, float("nan"), "x")],
        *[chain_of(quantizer={"part": "Grid", "size": size}) for size in (15, "16", None, [16], 16.0)],
        *[chain_of(quantizer={"part": "NonUniform", "bits": bits}) for bits in (16, "4")],
        *[chain_of(quantizer={"part": "ProductVQ", "num_subvectors": n}) for n in (0, 4097, None)],
        *[chain_of({"part": "Grouping", "kind": "random", "seed": seed}) for seed in ("a", -1, 2**63, None)],
        *[
            chain_of({"part": "Grouping"} | bad)
            for bad in ({"shrink": True}, {"kind": ["strided"]}, {"group_size": 8.0})
        ],
        chain_of({"part": "VectorScale", "kind": ["std"]}),
        chain_of(quantizer={"part": "ResidualVQ", "codebook_size": 10**9, "group_size": 32}),
        chain_of(quantizer={"part": "ResidualVQ", "beam": 10**4, "group_size": 32}),
        chain_of({"part": "TokenBlock"}, quantizer={"part": "Entropy", "quantizer": UNIFORM, "strength": 10**9}),
        chain_of({"part": "TokenBlock"}, quantizer={"part": "Entropy", "quantizer": {"part": "Entropy"}}),
        chain_of("MeanRemoval", head_dim=10**9),
        chain_of("MeanRemoval", head_dim=32768, num_kv_heads=4096),
        chain_of("MergeHeads", "Hadamard", head_dim=32768, num_kv_heads=512),
        chain_of("Hadamard", head_dim=16384),
        chain_of({"part": "TokenBlock", "tokens": 65536}, "ChannelScale", head_dim=512),
        *[
            chain_of("MergeHeads", {"part": "Grouping", "group_size": 7}, head_dim=32768, num_kv_heads=n)
            for n in (2, 4096)
        ],
        chain_of(*["Hadamard"] * 17),
        chain_of(
            {"part": "TokenBlock"},
            quantizer={"part": "Entropy", "quantizer": {"part": "Uniform", "bits": 8}, "tables": "adaptive"}
            | {"prior": "uniform"},
            head_dim=32768,
            num_kv_heads=4,
        ),
        chain_of(UNIFORM),
        chain_of(quantizer=None),
        chain_of(quantizer={"part": "Quantizer"}),
        {"part": "Fp16", 5: 3},
        {"part": "Fp16", "ready": True},
    ],
    ids=str,
)
def test_altered_settings_are_refused(config):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FormatError):
        codec_from_config(config, {})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # kB: nothing made by claim


@pytest.mark.parametrize("depth", [40, 400, 4000])
def test_settings_nested_without_end_are_refused(depth):
    deep_parts, deep_lists = chain_of(), []
    for _ in range(depth):
        deep_parts, deep_lists = fallback(inner=deep_parts), [deep_lists]
    for config in (
        deep_parts,
        deep_lists,
        chain_of(deep_lists),
        {"part": deep_lists},
        {"part": "Fp16", "x": deep_lists},
    ):
        with pytest.raises(FormatError):
            codec_from_config(config, {})


def test_altered_tensors_raise_nothing_else():
    codec = fitted("kvquant")
    state = codec.state_dict()
    for scale in (0 * state["stages.0.scale"], -state["stages.0.scale"]):
        with pytest.raises(FormatError, match="'scale' is not positive"):
            codec_from_config(codec.config(), state | {"stages.0.scale": scale})
    for wrong in (5, [1], {5: 3}, {5: torch.zeros(1)}, {name: None for name in state}, state | {"stages.0.mean": "x"}):
        with pytest.raises(FormatError):
            codec_from_config(codec.config(), wrong)


def test_a_fallback_inside_a_fallback_is_refused():
    inner = Chain([], Fallback(Chain([], Uniform(4), 8, 1), 0.1, 8), 8, 1)
    codec = codec_from_config(Chain([], Fallback(inner, 0.1, 8), 32, 1).config(), {})
    with pytest.raises(DataError, match="same number of bytes"):
        codec.encode(gaussian(1, 1, 4, 32))


@pytest.mark.parametrize("name", EVERY)
def test_every_codec_can_write_a_snapshot_stream(name, tmp_path):
    codec, steps = fitted(name), [gaussian(2, 2, 20, 32, seed=seed) for seed in range(4)]
    with SnapshotWriter(tmp_path / "s", keyframes=codec, deltas=codec, interval=3) as writer:
        for x in steps:
            writer.append([x], [x])
    stream = SnapshotReader(tmp_path / "s")
    assert len(stream) == 4
    keys, _ = stream.state(2)
    whole = 60 - 60 % codec.tokens_per_row
    exact = torch.cat(steps[:3], dim=2)[:, :, :whole]
    torch.testing.assert_close(keys[0][:, :, :whole], codec.decode(codec.encode(exact)))


SEEDS, DECAYS = (-1, 2**63, "a", 1.0, None, True), (1, -0.1, float("nan"), "x", None)


@pytest.mark.parametrize(
    ("make", "name", "values"),
    [
        *[(make, "seed", SEEDS) for make in (ResidualVQ, NonUniform, ProductVQ, Grouping)],
        *[(make, "decay", DECAYS) for make in (ResidualVQ, NonUniform)],
        (ResidualVQ, "kmeans_iterations", (-1, 10**9, "x", 2.0)),
        (ResidualVQ, "samples_per_code", (0, 10**9, 2.5)),
        (ResidualVQ, "num_quantizers", (0, 65, True)),
        (ResidualVQ, "beam", (0, 257)),
        (HalfQuadratic, "bits", (0, 9, 1000, 2.0, "4", True)),
        (HalfQuadratic, "iterations", (0, -1, 10**9, 2.0, None)),
        (HalfQuadratic, "norm", (0, -1, 1.1, float("nan"), "x")),
        (HalfQuadratic, "beta", (0, -1, float("nan"), None)),
        (partial(Fallback, Chain([], Uniform(4))), "block_size", (0, -8, 8.0, True, "8", 1 << 30)),
        (partial(Fallback, Chain([], Uniform(4))), "threshold", (-1, float("nan"), "x", None)),
    ],
)
def test_settings_beyond_reason_are_named(make, name, values):
    for value in values:
        with pytest.raises(DataError, match=name):
            make(**{name: value})
    assert make()


def test_a_row_is_bounded_at_the_first_fit_too():
    codec = Chain([TokenBlock(65536), ChannelScale()], Uniform(4))
    with pytest.raises(DataError, match="use smaller blocks of tokens"):
        codec.fit(torch.zeros(1, 1, 1, 512).expand(1, 1, 65536, 512))
