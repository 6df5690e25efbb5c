"""What ``recommend`` says, against caches that are filled, and against the tables that its losses come from."""

import dataclasses

import pandas as pd
import pytest

from vqkv import calibrate, load_corpus, load_model, presets, recommend
from vqkv.errors import DataError
from vqkv.evaluation.footprint import Footprint
from vqkv.evaluation.recommend import BASELINE, break_even, measurements
from vqkv.study import measured, tables
from vqkv.study.experiments.designs import published
from vqkv.study.experiments.frontier import chosen_settings

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
    preset = dataclasses.replace(presets.make(name, **arguments), sink_tokens=4)
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
    assert row["bits_all_told"] == pytest.approx(8e9 * row["cache_gb"] / (300 * 2 * 6 * 128))


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


def test_of_equal_bytes_the_exact_one_is_recommended():
    table = recommend(LLAMA, context=36).set_index("system")  # where blocks of 128 tokens are not yet packed
    assert table.loc["quanto 4", "bits_all_told"] == 16 and not table.loc["quanto 4", "recommended"]
    assert table.loc[BASELINE, "recommended"]


def test_rows_go_by_bits_and_recommended_ones_lose_ever_less(table):
    assert table["bits_all_told"].is_monotonic_increasing and table.loc[BASELINE, "bits_all_told"] == 16
    fits = table["longest"] >= 32768
    assert not table.loc[~fits, "recommended"].any()
    losses = table.loc[fits, "kl"].tolist()
    beaten = [any(other <= loss for other in losses[:row]) for row, loss in enumerate(losses)]
    assert table.loc[fits, "recommended"].tolist() == [not each for each in beaten] and not fits.all()
    quick = recommend(LLAMA, context=32768, ms_per_token=3000).set_index("system")
    assert (quick.loc[quick["recommended"], "ms_per_token"] <= 3000).all() and quick.loc["live 3.25", "recommended"]


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


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"context": 0}, "context"),
        ({"batch_size": 1.5}, "batch_size"),
        ({"model_or_config": "no/such/model"}, "no config.json of 'no/such/model'"),
        ({"model_or_config": "mistralai/Mistral-7B-v0.1"}, "sliding window"),
    ],
)
def test_bad_input_is_named(wrong, message, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=message):
        recommend(**{"model_or_config": LLAMA} | wrong)
