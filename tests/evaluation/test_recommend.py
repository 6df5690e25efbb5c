"""What fits a memory, and what ``recommend`` says: sizes against caches that were really filled, searches against
counting by hand, losses against the tables that they come from."""

from dataclasses import replace

import pandas as pd
import pytest
import small_models
import torch
from codec_zoo import CODED, PREDICTED
from codec_zoo import PRESETS as SMALL
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, DynamicCache, GPT2Config, LlamaConfig, T5Config

from vqkv import DataError, FormatError, calibrate, capacity, load_corpus, load_model, presets, recommend
from vqkv.cache.meter import tensor_bytes
from vqkv.evaluation.footprint import GB, Footprint, architecture, dynamic_footprint, footprint, weight_bytes
from vqkv.evaluation.recommend import BASELINE, break_even, measurements
from vqkv.study import measured, tables
from vqkv.study.experiments.designs import published
from vqkv.study.experiments.frontier import chosen_settings

TOKENS = torch.randint(1, 4096, (6, 48), generator=torch.Generator().manual_seed(0))
LONG = torch.randint(1, 4096, (3, 320), generator=torch.Generator().manual_seed(1))
PIECES = (1, 1, 4, 17, 18, 1, 128, 5, 88, 1)  # sinks half full, blocks of 16 and of 128 almost full and packed
RAGGED = {name: SMALL[name] for name in ("lossless", "cachegen", "vqq", "vqq_product")}
RAGGED |= {f"{name}+ans": preset for name, preset in CODED.items()} | {"kvtc": PREDICTED["kvtc"]}
LEARNED_SIZE = ("block_gtq",)  # how many norms a token takes is learned
FIXED = {name: preset for name, preset in (SMALL | PREDICTED).items() if name not in (*RAGGED, *LEARNED_SIZE)}
FIXED["kivi held"] = replace(SMALL["kivi"], sink_tokens=3, block_tokens=24)
MODEL = architecture(small_models.CONFIGS["llama"](), "float32")


def feed(model, cache, tokens, pieces):
    """Yields the tokens in the cache after each piece."""
    for part in tokens[:, : sum(pieces)].split(list(pieces), dim=1):
        with torch.inference_mode():
            model(part, past_key_values=cache, use_cache=True)
        yield cache.get_seq_length()


# Sizes


@pytest.mark.parametrize("name", [*FIXED])
def test_every_length_and_batch_takes_what_was_foretold(llama, name):
    """From the preset alone, before anything is calibrated, and from the fitted compressor."""
    foretold = footprint(llama, FIXED[name])
    compressor = calibrate(llama, TOKENS, FIXED[name], progress=False)
    assert foretold.side_information == compressor.side_bytes
    assert footprint(llama, compressor) == foretold
    for batch, pieces in ((3, PIECES[:6]), (1, PIECES)):
        cache = compressor.new_cache(llama)
        for seq_len in feed(llama, cache, LONG[:batch], pieces):
            report = cache.report()
            assert report.cache_bytes == foretold.cache_bytes(seq_len, batch)
            assert foretold.parts(seq_len)[1] * batch * foretold.values == report.packed_values
        assert tensor_bytes(cache) - tensor_bytes(compressor) == foretold.cache_bytes(sum(pieces), batch)
    assert report.bits_per_value == foretold.bits_per_value


@pytest.mark.parametrize("name", ["llama-yarn", "gemma", "qwen2", "gpt2", "opt"])
def test_a_config_alone_tells_what_the_loaded_model_does(name, tmp_path):
    model = small_models.load(name, tmp_path)
    laid_out = architecture(str(tmp_path), "float32")
    assert laid_out.device.type == "meta" and not any(x.device.type != "meta" for x in laid_out.parameters())
    held = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in model.state_dict().values()}
    assert weight_bytes(model) >= sum(held.values())  # tied ones once, and buffers that are not saved
    assert footprint(laid_out, presets.kivi(block_tokens=16)) == footprint(model, presets.kivi(block_tokens=16))
    assert dynamic_footprint(laid_out) == dynamic_footprint(model)
    for source in (model, model.config, AutoConfig.from_pretrained(tmp_path).to_dict()):
        assert weight_bytes(architecture(source, "bfloat16")) < 0.51 * weight_bytes(model)


def test_the_baseline_is_dynamic_cache(llama):
    model, cache = load_model(llama.vqkv_name, dtype="bfloat16")[0], DynamicCache()
    needed = dynamic_footprint(model)
    for seq_len in feed(model, cache, LONG, (5, 40, 1)):
        assert tensor_bytes(cache) == needed.cache_bytes(seq_len, 3)
    keys = tensor_bytes(cache.layers[0].keys)  # torch.cat copies them while the old ones are there
    assert needed.kinds(seq_len, 3)["working"] == keys
    assert dynamic_footprint(llama).exact == needed.exact  # an fp32 model's baseline has 16 bits too


@pytest.mark.parametrize("name", ["cachegen", "kivi+ans", "kvtc"])
def test_sizes_that_depend_on_the_text_are_refused(llama, name):
    for sizes in (RAGGED[name], calibrate(llama, TOKENS, RAGGED[name], progress=False)):
        with pytest.raises(DataError, match="depends on what is stored"):
            footprint(llama, sizes)


# Searches


@st.composite
def footprints(draw):
    names = ("weights", "side_information", "working")
    return Footprint(
        **{name: draw(st.integers(0, 40)) for name in names},
        block_bytes=draw(st.integers(0, 300)),
        block=draw(st.integers(1, 9)),
        exact=draw(st.integers(1, 40)),
        values=4,
        sink_tokens=draw(st.integers(0, 5)),
        recent_window=draw(st.integers(0, 9)),
    )


@settings(max_examples=80, deadline=None)
@given(footprints(), st.integers(1, 4), st.integers(1, 80))
def test_the_peak_is_the_largest_total_on_the_way(needed, batch, seq_len):
    totals = [sum(needed.kinds(n, batch).values()) for n in range(seq_len + 1)]
    assert needed.peak(seq_len, batch) == max(totals)
    assert all(sum(needed.parts(n)) == n and min(needed.parts(n)) >= 0 for n in range(seq_len + 1))


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 150), st.integers(0, 400_000), st.sampled_from(["kivi", "higgs", "vqllm", "fp16"])
)
def test_context_and_batch_are_found_as_by_counting(batch, context, spare, name):
    memory = weight_bytes(MODEL) + spare
    needed = footprint(MODEL, SMALL[name])
    if needed.weights + needed.side_information > memory:
        with pytest.raises(DataError, match="does not fit"):
            capacity(MODEL, SMALL[name], memory / GB, batch, context)
        return
    fits = capacity(MODEL, SMALL[name], memory / GB, batch, context)
    totals = ((n, sum(needed.kinds(n, batch).values())) for n in range(1, 100_000))
    assert fits.context == next(n for n, total in totals if total > memory) - 1
    peaks = ((n, needed.peak(context, n)) for n in range(1, 100_000))
    assert fits.batch_size == next(n for n, peak in peaks if peak > memory) - 1
    assert sum(fits.kinds.values()) <= memory


def test_the_models_own_limit_is_reported_and_nothing_drawn():
    config, state = GPT2Config(n_layer=2, n_positions=256), torch.random.get_rng_state()
    fits = capacity(config, presets.quanto(2), 0.9)
    assert fits.model_limit == 256 and fits.dtype == "float16" and fits.preset == "quanto"
    assert capacity(config, presets.vqllm(2, 8, 16), 1).context > 0
    assert torch.equal(torch.random.get_rng_state(), state)  # nothing is drawn from the caller's random numbers


# Bad input


@pytest.mark.parametrize(
    ("ask", "changes", "message"),
    [
        (capacity, {"context": 0}, "context 0"),
        (capacity, {"preset": "quanto"}, "pass a Preset"),
        (capacity, {"preset": presets.vqllm(group_size=24)}, "24"),  # does not divide a head_dim of 32
        (capacity, {"memory_gb": 1e-4}, r"a memory of 0\.0001 GB: weights of 0\.00"),
        (capacity, {"model_or_config": T5Config()}, "neither what is kept of an encoder"),
        (capacity, {"model_or_config": {"model_type": "llama", "num_attention_heads": 0}}, "no causal language model"),
        (capacity, {"model_or_config": LlamaConfig(quantization_config={"quant_method": "gptq"})}, "quantized weight"),
        (capacity, {"model_or_config": LlamaConfig(num_hidden_layers=0)}, "hands no keys and values"),
        (capacity, {"model_or_config": small_models.SLIDING["mistral"]()}, "sliding_window=None"),
        (recommend, {"context": 0}, "context"),
        (recommend, {"batch_size": 1.5}, "batch_size"),
        (recommend, {"model_or_config": "no/such/model"}, "no config.json of 'no/such/model'"),
        (recommend, {"model_or_config": "mistralai/Mistral-7B-v0.1"}, "sliding window"),
    ],
)
def test_bad_arguments_name_their_remedy(ask, changes, message, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    given = {"preset": presets.fp16(), "memory_gb": 1} if ask is capacity else {}
    with pytest.raises(DataError, match=message):
        ask(**{"model_or_config": MODEL} | given | changes)


def test_a_compressor_of_another_model(llama, tmp_path):
    compressor = calibrate(llama, TOKENS, SMALL["quanto"], progress=False)
    assert capacity(llama.config, compressor, 1).context == capacity(llama.config, SMALL["quanto"], 1).context
    with pytest.raises(FormatError, match="layers, KV heads or head_dim differ"):
        capacity(GPT2Config(n_layer=2, n_head=2, n_embd=32), compressor, 1)
    with pytest.raises(FormatError, match="was fitted to"):
        capacity(small_models.load("qwen3", tmp_path), compressor, 1)


LLAMA = "meta-llama/Meta-Llama-3-8B"
PASSED_OVER = ("seed", "kmeans_iterations", "sink_tokens", "recent_window", "pre_rope")
VQLLM = {f"vqllm {depth}x1024": [depth, 1024] for depth in (3, 6, 8)}


@pytest.fixture(scope="module")
def table():
    return recommend(LLAMA, context=32768, memory_gb=16.5).set_index("system")


def test_the_packaged_numbers_are_those_of_pages_08_and_11():
    made = measured.measured(*(tables.stored(name)[0] for name in ("11_frontier", "08_latency", "08_in_place")))
    pd.testing.assert_frame_equal(made.fillna({"grows": ""}), measurements(), rtol=1e-5, check_dtype=False)


@pytest.mark.parametrize("label", [label for label, (*_, grows) in measured.SYSTEMS.items()])
def test_a_recommended_preset_is_the_one_that_was_measured(label):
    given = (VQLLM, 4, 0, chosen_settings(tables.stored("11_tuning")[0]))
    name, arguments, _ = measured.SYSTEMS[label]
    tried = published(*given)[label]
    preset = replace(presets.make(name, **arguments), sink_tokens=4)
    for role in ("key_codec", "value_codec"):
        one, other = (getattr(made, role)(64).config() for made in (preset, tried))
        assert _without(one) == _without(other)
    assert _without(preset.arguments) == _without(tried.arguments)
    assert (preset.recent_window, preset.pre_rope) == (tried.recent_window, tried.pre_rope)


def _without(config):
    """Without seeds and steps of training, which change no bytes, and exact tokens, which settings tell."""
    if isinstance(config, list):
        return [_without(item) for item in config]
    if not isinstance(config, dict):
        return config
    return {key: _without(value) for key, value in config.items() if key not in PASSED_OVER}


def test_bytes_are_those_of_a_cache_that_is_filled():
    model, tokenizer = load_model("vqkv/llama-mini")
    text = load_corpus("python-stdlib", tokenizer, split="train", seq_len=300, num_seqs=1)
    cache = calibrate(model, text, presets.higgs(3, recent_window=0), progress=False).new_cache(model)
    model(text, past_key_values=cache)
    row = recommend(model, context=300).set_index("system").loc["higgs 3"]
    report = cache.report()
    assert round(row["cache_gb"] * 1e9) == report.cache_bytes + report.side_bytes
    assert row["bits_with_side"] == pytest.approx(8e9 * row["cache_gb"] / (300 * 2 * 6 * 128))


SMOLLM2 = {
    "model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "vocab_size": 49152,
    "num_key_value_heads": 3, "intermediate_size": 1536,
}  # fmt: skip


def test_what_is_scaled_is_what_was_measured():
    """On the model that it is scaled from."""
    tables_of = [recommend(SMOLLM2, context=context).set_index("system")["side_mb"] for context in (8192, 1 << 20)]
    side_mb = pd.concat(tables_of).groupby("system").first()
    means = tables.stored("11_frontier")[0].groupby(["system", "nominal_bits"])["side_bytes"].mean() / 1e6
    for label, row in (("best-mid 1.8", ("best-mid", 1.8)), ("kvtc 1", ("kvtc 1", 0))):
        assert side_mb[label] == pytest.approx(means[row], rel=1e-3)
    assert side_mb["best-long 1.8"] == pytest.approx(means["best-long", 1.8], rel=1e-3)


def test_presets_that_cannot_store_a_shape_have_no_row():
    config = {"model_type": "llama", "hidden_size": 144, "num_attention_heads": 3, "num_key_value_heads": 3}  # of 48
    systems = set(recommend(config | {"num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 64})["system"])
    assert {"quanto 4", "best-long 0.9"} <= systems and "vqllm 8x1024" not in systems
    assert "higgs 2" in set(recommend("google/gemma-7b")["system"])


def test_rows_go_by_bits_and_recommended_ones_lose_ever_less(table):
    assert table["bits_with_side"].is_monotonic_increasing and table.loc[BASELINE, "bits_with_side"] == 16
    fits = table["longest"] >= 32768
    assert not table.loc[~fits, "recommended"].any()
    losses = table.loc[fits, "kl"].tolist()
    beaten = [any(other <= loss for other in losses[:row]) for row, loss in enumerate(losses)]
    assert table.loc[fits, "recommended"].tolist() == [not each for each in beaten] and not fits.all()
    quick = recommend(LLAMA, context=32768, ms_per_token=3000).set_index("system")
    assert (quick.loc[quick["recommended"], "ms_per_token"] <= 3000).all() and quick.loc["live 3.25", "recommended"]
    short = recommend(LLAMA, context=36).set_index("system")  # of equal bytes the exact one: nothing is packed yet
    assert short.loc["quanto 4", "bits_with_side"] == 16 and not short.loc["quanto 4", "recommended"]
    assert short.loc[BASELINE, "recommended"]


def test_calls_make_the_presets_that_they_name(table):
    made = eval(table.loc["best-mid 1.8", "preset"], {"presets": presets})
    assert made.name == "best" and made.if_too_few_tokens is not None
    short = recommend(LLAMA, context=4096).set_index("system")["preset"]
    assert "best-mid 1.8" not in short and eval(short["best-short 1.8"], {"presets": presets}).if_too_few_tokens is None


@pytest.mark.parametrize(("block", "side", "tokens"), [(1, 0, 1), (32, 0, 32), (1, 1200, 101), (32, 1200, 128)])
def test_break_even_is_where_the_cache_gets_smaller(block, side, tokens):
    """12 of 16 bytes are saved a token, once a block of them is packed."""
    needed = Footprint(0, side, 4 * block, block, 16, 0, 8)
    assert break_even(needed) == tokens
    before = tokens - 1
    assert needed.cache_bytes(tokens) + side < 16 * tokens and needed.cache_bytes(before) + side >= 16 * before
