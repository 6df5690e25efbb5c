"""Eviction: scores are the model's own attention, and a cache that evicts equals attention that masks."""

import copy
from functools import partial

import pytest
import small_models
import strategies
import torch
from codec_zoo import PRESETS as SMALL
from hypothesis import given, settings
from hypothesis import strategies as st
from projections import kv_sources
from strategies import exact
from transformers import DynamicCache

from vqkv import DataError, calibrate
from vqkv.cache.meter import tensor_bytes
from vqkv.models.capture import capture
from vqkv.study.eviction import H2O, EvictedKeys, heavy_hitters, snapkv, token_mask

TOKENS = strategies.TOKENS[:2, :40]
PIECES = (20, 7, 1, 1, 11)
model = small_models.fixture("gpt2", "llama-yarn", "qwen2")
run = partial(strategies.run, tokens=TOKENS, pieces=PIECES)


def masked_run(model, retain, recent):
    """A full cache, and for each layer and head a mask over the tokens that H2O drops after the first piece."""
    sources, cache, seen, logits = kv_sources(model), DynamicCache(), 0, []
    kv_heads, masks = sources[0].num_kv_heads, {}
    alive = torch.ones(len(sources), 2, kv_heads, 40, dtype=torch.bool)

    def masked(module, args, kwargs):
        return args, kwargs | {"attention_mask": masks[module.layer_idx]}

    handles = [source.attention.register_forward_pre_hook(masked, with_kwargs=True) for source in sources]
    model.set_attn_implementation("eager")
    for piece in TOKENS.split(list(PIECES), 1):
        new, first = piece.shape[1], seen == 0
        seen += new
        causal = torch.ones(new, seen, dtype=torch.bool).tril(seen - new).expand(2, 1, new, seen)
        for source in sources:
            per_kv_head = model.config.num_attention_heads // kv_heads
            heads = alive[source.layer_idx, ..., :seen].repeat_interleave(per_kv_head, 1)
            masks[source.layer_idx] = torch.where(causal & heads[:, :, None], 0.0, torch.finfo(torch.float32).min)
        with torch.inference_mode():
            out = model(piece, past_key_values=cache, output_attentions=True)
        logits.append(out.logits)
        for layer, weights in enumerate(out.attentions if first else ()):
            totals = weights.sum(2).unflatten(1, (kv_heads, -1)).sum(2)
            for index in torch.cartesian_prod(torch.arange(2), torch.arange(kv_heads)).tolist():
                score, newest = totals[tuple(index)].tolist(), set(range(seen - round(recent * seen), seen))
                order = sorted(range(seen), key=lambda t: (t in newest, score[t], t), reverse=True)
                alive[(layer, *index)][order[round(retain * seen) :]] = False
    for handle in handles:
        handle.remove()
    model.set_attn_implementation("sdpa")
    return torch.cat(logits, 1), alive


def test_evicting_equals_masking_the_evicted(model):
    """Pre-RoPE keys, so that each head's kept tokens must be rotated back at their own positions."""
    cache = H2O(exact(model), retain=0.5, recent=0.2).new_cache(model)
    expected, alive = masked_run(model, 0.5, 0.2)
    torch.testing.assert_close(run(model, cache), expected, rtol=1e-3, atol=2e-4)
    assert not torch.allclose(expected, run(model, exact(model).new_cache(model)), atol=1e-2)  # it matters
    kept = 10 + 20
    assert cache.get_seq_length() == 40 and cache.get_mask_sizes(1, 0) == (kept + 1, 40 - kept)
    for layer, expected_tokens in zip(cache.layers, alive, strict=True):
        assert sum(layer.stores[0].parts) == sum(layer.stores[1].parts) == kept
        if isinstance(held := layer.stores[0], EvictedKeys):
            assert torch.equal(token_mask(held.tokens(40), 40), expected_tokens)
    keys = capture(model, TOKENS)[0][0][alive[0]].view(2, -1, kept, cache.compressor.model["shapes"][0][1])
    torch.testing.assert_close(cache.layers[0].stores[0].payload.fields["values"], keys, rtol=1e-3, atol=1e-4)


def test_sinks_window_and_rope_as_stored(llama):
    """Where the window and sinks are exact in 16 bits, they are never evicted; post-RoPE keys need no positions."""
    before, after = (exact(llama, sink_tokens=3, recent_window=5, pre_rope=pre_rope) for pre_rope in (True, False))
    caches = [H2O(c, 0.5, 0.1).new_cache(llama) for c in (before, after)]
    outputs = [run(llama, cache) for cache in caches]
    torch.testing.assert_close(*outputs, rtol=0.02, atol=0.02 * outputs[0].std().item())
    kept = H2O(before, 0.5, 0.1).new_cache(llama, decoded_cache_bytes=10**6)
    assert torch.equal(run(llama, kept), outputs[0]) and kept.report().kinds["decoded"]
    for cache, stored_bits in zip(caches, (3 * 2 * 2 * 3, 0), strict=True):
        assert [store.parts[::2] for store in cache.layers[1].stores] == [(3, 5), (3, 5)]
        assert cache.report().kinds["positions"] == stored_bits  # layers x batch x heads x a bit for each token seen
    with pytest.raises(DataError, match="without padding"):
        llama(TOKENS, attention_mask=TOKENS.ne(TOKENS[0, 0]).long(), past_key_values=H2O(before).new_cache(llama))


@settings(max_examples=60, deadline=None)
@given(
    stored=st.integers(1, 40),
    shares=st.tuples(st.floats(0, 1), st.floats(0.01, 1)).map(sorted),
    exempt=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    levels=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_heavy_hitters_keep_the_newest_and_the_highest(stored, shares, exempt, levels, seed):
    recent, retain = shares
    scores = torch.randint(levels, (2, 3, stored), generator=torch.Generator().manual_seed(seed)).float()
    kept = heavy_hitters(scores, retain, recent, *exempt)
    sinks, newest = min(exempt[0], stored), min(stored, max(exempt[1], round(recent * stored)))
    assert kept.shape[-1] == min(stored, max(1, round(retain * stored), exempt[0] + newest))
    assert (kept.diff(dim=-1) > 0).all()
    for row, chosen in zip(scores.flatten(0, 1).tolist(), kept.flatten(0, 1).tolist(), strict=True):
        must = {*range(sinks), *range(stored - newest, stored)}
        assert must <= set(chosen)
        worst = min(((row[t], t) for t in set(chosen) - must), default=None)
        assert worst is None or all((row[t], t) < worst for t in set(range(stored)) - set(chosen))


@pytest.mark.parametrize("name", ["fp16", "vqllm", "kivi"])
def test_every_preset_evicts_once_before_packing_and_counts_what_is_kept(llama, name):
    tokens = torch.randint(1, 4096, (2, 220), generator=torch.Generator().manual_seed(1))
    compressor = calibrate(llama, tokens, SMALL[name], progress=False)
    cache, full = H2O(compressor, 0.75, 0.1).new_cache(llama), compressor.new_cache(llama)
    logits, full_logits = (run(llama, c, tokens=tokens, pieces=(200, 1, 1, 18)) for c in (cache, full))
    report, plain = cache.report(), full.report()
    assert sum(cache.layers[2].stores[0].parts) == 150 + 20 and report.seq_len == 220
    assert report.packed_values > 0 and report.cache_bytes < plain.cache_bytes
    assert tensor_bytes(cache) - tensor_bytes(compressor) == report.cache_bytes
    assert report.values == plain.values and report.ratio == report.values * 2 / report.cache_bytes
    if name == "vqllm":  # of which no tokens wait
        assert report.packed_values == report.values * 170 // 220 and report.bits_per_value == plain.bits_per_value
    assert (logits - full_logits)[:, 200:].abs().max() < 10 * full_logits.std()


def test_snapkv_keeps_what_the_last_queries_see_and_these(model):
    """Sums of the last 6 queries' probabilities, the best of 3 neighbours, and the 6 tokens themselves."""
    cache = snapkv(exact(model), 0.5, observed=6, pool=3).new_cache(model)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    with torch.inference_mode():
        model(TOKENS, past_key_values=cache, use_cache=True)
        attentions = eager(TOKENS, output_attentions=True).attentions
    for layer, weights in zip(cache.layers, attentions, strict=True):
        assert sum(layer.stores[0].parts) == 20
        if isinstance(held := layer.stores[0], EvictedKeys):
            scores = weights[:, :, -6:].sum(2).unflatten(1, (held.kept.shape[1], -1)).sum(2)
            around = torch.nn.functional.pad(scores, (1, 1)).unfold(-1, 3, 1).amax(-1)
            around[..., -6:] = torch.inf
            mask, expected = (token_mask(x, 40) for x in (held.tokens(40), around.topk(20).indices))
            assert (mask == expected).float().mean() > 0.95  # neighbours that share a maximum are a tie
