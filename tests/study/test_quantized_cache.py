"""Page 16's tables at a small size: residual lengths, greedy text, and models with quantized weights."""

import pandas as pd
import pytest
import torch

from vqkv import UnknownNameError
from vqkv.cache.meter import tensor_bytes
from vqkv.study import experiments, figures
from vqkv.study.bench.caches import quantized_weights, random_llama, random_tokens
from vqkv.study.bench.generation import latency

WHERE = {"corpus": "python-stdlib", "seed": 0, "dtype": "", "device": "cpu"}


def test_what_is_held_exact_costs_bits_and_spares_loss(llama_folder):
    systems = {"swept": ["transformers quanto 2", "quanto 2"], "lengths": [0, 16], "systems": ["transformers hqq 8"]}
    read = {"prompt_len": 32, "seq_len": 64, "num_seqs": 3}
    table = experiments.residual_lengths([llama_folder], **systems, length=16, **read, **WHERE)
    assert table["length"].tolist() == [0, 16, 0, 16, 16] and (table["scored_tokens"] == 31).all()
    theirs, ours, eight = (rows.set_index("length") for _, rows in table.groupby("system", sort=False))
    assert theirs.loc[0, "held"] == 0 and theirs.loc[16, "held"] == pytest.approx(sum([*range(16), *range(15)]) / 31)
    for rows, bits in ((theirs, 2.5), (ours, 3)):  # groups of 64, of two tokens here, or of a head's 32 channels
        assert rows.loc[16, "kl_mean"] < rows.loc[0, "kl_mean"]
        assert rows["bits_per_value"].between(bits, 1.05 * bits).all()  # scales weighed in 16 bits, few groups padded
        expected = rows["bits_per_value"] + (16 - rows["bits_per_value"]) * rows["held"] / 1024
        assert rows["bits_1k"].tolist() == pytest.approx(expected.tolist())
    assert eight["kl_mean"].iloc[0] < 0.1 * theirs.loc[16, "kl_mean"]
    steps = experiments.worth_of_steps(table, *systems["swept"], "transformers hqq 8")
    assert figures.residual_lines(table, steps, systems["swept"]).axes


def test_a_step_is_worth_what_its_bits_would_bring_elsewhere():
    rows = [("a", 0, 8.0, 4, 4, 4), ("a", 16, 2.0, 4, 5, 4.5), ("b", 16, 9.0, 4, 4, 4), ("c", 16, 1.0, 6, 6, 6)]
    columns = ["system", "length", "kl_mean", "bits_per_value", "bits_1k", "bits_8k"]
    found = experiments.worth_of_steps(pd.DataFrame(rows, columns=columns).assign(model="m"), "a", "b", "c")
    assert found.index.tolist() == [("m", 16)]
    assert found[["rate", "gain", "at_1k", "at_8k"]].iloc[0].tolist() == pytest.approx([3, 4, 3, 3**0.5])


def test_greedy_text_is_compared_with_the_exact_model_s_own(llama_folder):
    write = {"train_seqs": 1, "seq_len": 64, "prompts": 3, "prompt_len": 40, "new_tokens": 12, "shown": 2}
    systems = ["transformers quanto 2", "quanto 4"]
    table = experiments.greedy_text([llama_folder], systems=systems, **write, **WHERE)
    assert list(dict.fromkeys(table["system"])) == ["exact", "fp16", *systems] and len(table) == 4 * 3
    assert (table[table["system"] == "exact"]["same"] == 12).all() and table["same"].between(1, 12).all()
    assert table["text"].notna().sum() == 4 * 2
    whole = table[table["same"] == 12].dropna()
    assert all(text == table["text"][number] for number, text in zip(whole["prompt"], whole["text"], strict=True))


def test_first_difference_and_columns_of_text():
    rows = [("exact", 0, 4, "a\n\nb"), ("small", 0, 1, "abcdef"), ("exact", 1, 4, None), ("small", 1, 4, None)]
    greedy = pd.DataFrame(rows, columns=["system", "prompt", "same", "text"])
    greedy = greedy.assign(model="m", new_tokens=4, prompt_text="x\ny\nz")
    found = experiments.first_difference(greedy).loc["m"]
    assert found.loc["small", ["q1", "median", "q3", "never"]].tolist() == [1.75, 2.5, 3.25, 0.5]
    assert found.loc["exact", "never"] == 1
    lines = experiments.side_by_side(greedy, "m", ["exact", "small"], width=5).splitlines()
    assert lines == ["... y", "... z", "exact | small", "----- | -----", "a     | abcde", "      | f", "b     |"]


def test_quantized_weights_are_smaller_and_time_beside_the_model_s_own():
    model = random_llama("tiny")
    smaller, tokens = quantized_weights(model, "qint8"), random_tokens(model, 1, 8)
    assert tensor_bytes(list(smaller.parameters())) < tensor_bytes(list(model.parameters()))
    with torch.no_grad():
        change = (smaller(tokens).logits - model(tokens).logits).std() / model(tokens).logits.std()
    assert 0 < change < 0.05
    with pytest.raises(UnknownNameError, match="qint8"):
        quantized_weights(model, "qint9")
    how = {"geometry": "tiny", "codebook_sizes": [16], "seed": 0, "threads": 1, "dtype": "float32", "device": "cpu"}
    rows = pd.DataFrame(latency([[1, 8, 3], [2, 8, 3]], 1, ["quanto 4"], weights=["qint8"], **how))
    systems = list(dict.fromkeys(rows["system"]))
    assert len(systems) == 5 and systems[3:] == [f"{label}, qint8 weights" for label in systems[:2]]
    assert (rows["slowdown_q1"] <= rows["slowdown"]).all() and (rows["prefill_slowdown"] > 0).all()
    assert figures.rate_lines(rows, [1, 2], [8], systems[:3]).axes
