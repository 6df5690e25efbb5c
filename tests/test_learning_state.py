"""Learning that is interrupted and goes on in a fresh codec ends with the same bits as learning that never stopped."""

import pytest
import torch
from codec_zoo import EXTRA, HEAD_DIM, HEADS, SMALL, chain, gaussian
from hypothesis import given, settings
from hypothesis import strategies as st
from preset_zoo import EVERY
from safetensors.torch import load, save

from vqkv import FormatError
from vqkv.codec import (
    Chain,
    ChannelScale,
    Entropy,
    Fallback,
    Fp16,
    Grouping,
    MeanRemoval,
    NonUniform,
    ProductVQ,
    ResidualVQ,
    TokenBlock,
    codec_from_config,
)
from vqkv.codec.part import part_from_config

TOKENS = 240  # a multiple of every block in the zoos but kvquant's 7, and enough for every codebook
ROLES = ("key", "value")
MADE = {
    f"{name} {role}": getattr(preset, f"{role}_codec")
    for name, preset in (EVERY | {f"small {name}": preset for name, preset in SMALL.items()}).items()
    for role in ROLES
}
MADE |= {name: lambda head_dim, codec=codec: part_from_config(codec.config()) for name, codec in EXTRA.items()}
MADE |= {
    "revived": lambda head_dim: chain(revive=True, decay=0.5, codebook_size=60, init="random"),
    "learning beam": lambda head_dim: chain(learning_beam=3, beam=3),
    "product": lambda head_dim: Chain([MeanRemoval(), Grouping(group_size=8)], ProductVQ(2, 20, 4), 16),
    "product+ans": lambda head_dim: Chain([TokenBlock(5)], Entropy(ProductVQ(4, 20, 4)), 16),
    "levels": lambda head_dim: Chain([MeanRemoval(), ChannelScale()], NonUniform(3, decay=0.7)),
    "uniform prior": lambda head_dim: Chain([TokenBlock(4)], Entropy(NonUniform(2), "adaptive", prior="uniform")),
    "fallback of means": lambda head_dim: Chain([], Fallback(Chain([MeanRemoval()], ResidualVQ(2, 20, 8)), 0.1, 8)),
}


def batches():
    """Of different sizes and distributions, so that no two have the same statistics."""
    return [gaussian(2, HEADS, TOKENS // (1 + i % 2), HEAD_DIM, seed=i) * (1 + i) + i / 4 for i in range(3)]


def through_a_file(state):
    return load(save({name: tensor.contiguous().clone() for name, tensor in state.items()}))


def learn(codec, some):
    for batch in some:
        codec.partial_fit(batch)
    return codec


def same_state(a, b):
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("name", MADE)
def test_learning_goes_on_in_a_fresh_codec_with_the_same_bits(name):
    make, all_batches = MADE[name], batches()
    whole = make(HEAD_DIM)
    if whole.ready:
        assert whole.learning_state() == {} and make(HEAD_DIM).load_learning_state({}) is None
        return
    learn(whole, all_batches).finalize()
    for stop in range(len(all_batches)):
        begun = learn(make(HEAD_DIM), all_batches[:stop])
        resumed = make(HEAD_DIM)
        resumed.load_learning_state(through_a_file(begun.learning_state()))
        assert same_state(resumed.learning_state(), begun.learning_state())
        learn(resumed, all_batches[stop:]).finalize()
        assert same_state(resumed.state(), whole.state()) and resumed.config() == whole.config()
        assert resumed.learning_state() == {}


@pytest.mark.parametrize("name", ["vqllm key", "vqq value", "small kvquant key", "vqllm+ans key", "random", "revived"])
def test_a_codec_made_from_the_settings_alone_can_go_on(name):
    begun = learn(MADE[name](None), batches()[:2])
    resumed = part_from_config(begun.config())
    resumed.load_learning_state(begun.learning_state())
    x = batches()[2]
    assert same_state(resumed.fit(x).state(), begun.fit(x).state())
    assert codec_from_config(resumed.config(), resumed.state()).ready


@pytest.mark.parametrize("name", [name for name in MADE if not MADE[name](HEAD_DIM).ready])
def test_damaged_learning_states_are_refused(name):
    whole = learn(MADE[name](HEAD_DIM), batches()[:2]).learning_state()
    shape = whole["shape"]
    bad = [whole | {"more": shape}, whole | {"quantizer.more": shape}, whole | {"stages.0.more": shape}, {}]
    for field, tensor in whole.items():
        bad += [{n: t for n, t in whole.items() if n != field}, whole | {field: tensor.to(torch.complex64)}]
        bad += [whole | {field: tensor[None]}, whole | {field: torch.cat([tensor.flatten()] * 2)}]
        if tensor.is_floating_point():
            bad.append(whole | {field: tensor * torch.nan})
        if field.endswith(("counts", "count", "square", "generator")):
            bad.append(whole | {field: -1 - tensor.abs() if tensor.dtype != torch.uint8 else tensor * 0 + 255})
    sizes = [[HEADS, 17]] * (MADE[name](HEAD_DIM).head_dim is not None) + [[1 << 40, HEAD_DIM], [-1, HEAD_DIM]]
    bad += [whole | {"shape": torch.tensor(size)} for size in (*sizes, [HEADS, 0])]
    for state in bad:
        with pytest.raises(FormatError):
            MADE[name](HEAD_DIM).load_learning_state(state)


def test_another_codecs_learning_state_is_refused_by_name():
    state = learn(chain(), batches()[:1]).learning_state()
    with pytest.raises(FormatError, match="quantizer.codebooks|'codebooks'"):
        chain(codebook_size=21).load_learning_state(state)
    with pytest.raises(FormatError, match="head_dim 16, but this codec is for 32"):
        chain(head_dim=32).load_learning_state(state)
    with pytest.raises(FormatError, match="unexpected"):
        chain().load_learning_state(state | {"shape": torch.tensor([0, 16])})
    with pytest.raises(FormatError, match="altered"):
        Fp16(16).load_learning_state(state)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_it_may_be_interrupted_any_number_of_times(sizes, data):
    make = MADE[data.draw(st.sampled_from(["vqllm key", "revived", "levels", "small vqq_product key"]))]
    some = [gaussian(1, 2, 30 * size, HEAD_DIM, seed=i) for i, size in enumerate([8, *sizes])]
    whole, resumed = learn(make(HEAD_DIM), some).finalize(), make(HEAD_DIM)
    for batch in some:
        resumed.partial_fit(batch)
        if data.draw(st.booleans()):
            state, resumed = through_a_file(resumed.learning_state()), make(HEAD_DIM)
            resumed.load_learning_state(state)
    assert same_state(resumed.finalize().state(), whole.state())


@pytest.mark.parametrize("name", MADE)
def test_what_is_read_back_while_learning_is_what_a_cache_would_give_up_to_rounding(name):
    x = gaussian(2, HEADS, 2 * TOKENS, HEAD_DIM, seed=9)
    codec = MADE[name](HEAD_DIM)
    x = x[:, :, : x.shape[2] // codec.tokens_per_row * codec.tokens_per_row]
    if not codec.ready:
        with pytest.raises(RuntimeError, match="not fitted"):
            codec.read_back(x)
        before = learn(codec, batches()).read_back(x)
        codec.finalize()
        error = (before - codec.read_back(x)).square().mean() / x.square().mean()
        assert error < 1e-3  # a few vectors are as near to one code as to another
    assert torch.equal(codec.read_back(x), codec.decode(codec.encode(x)))
