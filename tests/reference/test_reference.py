"""The bundled models, their tokenizer and the script that trains them."""

import itertools
import json
import shutil

import numpy as np
import pytest
import torch
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

import vqkv
from vqkv.models.load import BUNDLED, describe
from vqkv.models.metrics import token_nll
from vqkv.reference import measure, rows, train
from vqkv.reference.measure import token_bytes


@pytest.mark.parametrize("name", sorted(BUNDLED))
def test_bundled_models_are_what_the_study_needs_and_their_cards_say(name):
    """Hidden size thrice the KV width, or predictors would be exact by algebra; text and recall, far from chance."""
    model, tokenizer = vqkv.load_model(name)
    about, config, card = describe(model), model.config, (BUNDLED[name] / "README.md").read_text()
    assert about["num_layers"] >= 6 and about["shapes"][0][1:] == [64, 64] and config.max_position_embeddings >= 1024
    assert name != "vqkv/llama-mini" or config.hidden_size >= 3 * about["shapes"][0][0] * 64
    log = json.loads((BUNDLED[name] / "training.json").read_text())
    assert f"{log['tokens']:,} in" in card and f"**{log['released']['bits_per_byte']:.3f}**" in card
    tokens = vqkv.load_corpus("python", tokenizer, "test", seq_len=1024, num_seqs=4)
    with torch.inference_mode():
        nll = token_nll(model(tokens).logits[:, :-1], tokens[:, 1:]).sum().item()
    bits = nll / np.log(2) / token_bytes(tokenizer)[tokens[:, 1:]].sum()
    assert bits < 1.35 * log["released"]["bits_per_byte"] < 2.4
    assert measure.recall_accuracy(model, rows.Words.of(tokenizer), 16, seed=1) > 0.9


@pytest.fixture
def data(tmp_path, tokenizer):
    ids = np.array(tokenizer("def f(x):\n    return x\n\ndef g(y):\n    print(y)\n" * 99)["input_ids"], dtype=np.uint16)
    for split in ("train", "validation"):
        (tmp_path / f"{split}.bin").write_bytes(ids.tobytes())
    return tmp_path


class Killed(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            raise KeyboardInterrupt


def test_training_that_was_killed_goes_on_and_its_release_loads(data, monkeypatch, tmp_path):
    """In steps of 128 tokens."""
    monkeypatch.setattr(train, "SHAPES", [(0, [(2, 64)])])
    monkeypatch.setattr(train, "abilities", lambda *args, **kw: {"recall": 0.5})
    uninterrupted = train.trainer("gpt2-mini", data, 4 * 128)
    uninterrupted.train()
    shutil.rmtree(data / "gpt2-mini")
    first, again = (train.trainer("gpt2-mini", data, 4 * 128) for _ in range(2))
    first.add_callback(Killed())
    with pytest.raises(KeyboardInterrupt):
        first.train()
    again.train(resume_from_checkpoint=get_last_checkpoint(data / "gpt2-mini"))
    assert again.state.global_step == 4
    for one, other in zip(uninterrupted.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
    train.release(again, tmp_path / "out", again.eval_dataset)
    model, _ = vqkv.load_model(str(tmp_path / "out"))
    assert torch.equal(model.lm_head.weight, again.model.lm_head.weight.half().float())
    log = json.loads((tmp_path / "out" / "training.json").read_text())
    assert log["tokens"] == 4 * 128 and {entry["step"] for entry in log["log"] if "recall" in entry} >= {3, 4}


def test_every_kind_of_row_is_a_function_of_the_step_and_labels_stand_where_something_can_be_known(tokenizer, data):
    text, words = rows.TokenStream(data / "train.bin", tokenizer), rows.Words.of(tokenizer)
    rng = np.random.default_rng(0)
    mixture, same = (train.Mixture(text, tokenizer, 10**6, times) for times in (1, 1))
    rates = [mixture.learning_rate(step) for step in range(len(mixture))]
    assert rates[:2] == [1 / 200, 2 / 200] and max(rates) == 1 and rates[-1] < 0.1
    for step in range(8):
        first, again = mixture[step], same[step]
        assert all(torch.equal(first[name], again[name]) for name in first)
        assert first["input_ids"].shape == first["labels"].shape == mixture.shapes[step]
        assert ((first["labels"] == rows.IGNORE) | (first["labels"] == first["input_ids"])).all()
    for _ in range(20):
        row, labels = rows.repeats(rng, 64, words.all)
        for at in np.flatnonzero(labels != rows.IGNORE):  # the pair stood there before
            assert (row[at - 1], row[at]) in set(itertools.pairwise(row[:at])) and labels[at] == row[at]
        row, labels = rows.recall(rng, 96, words, 4, text.span(rng, 30))
        (asked,) = np.nonzero(labels != rows.IGNORE)
        assert len(asked) >= 10 and asked[0] > 1 + 3 * 4 + 30
        assert all((row[at - 1], row[at]) in set(itertools.pairwise(row[: 1 + 3 * 4])) for at in asked)


@pytest.mark.parametrize("name", sorted(train.CIRCUITS))
def test_models_begin_with_an_induction_head(name, tokenizer):
    """The best head looks at what followed a word before, of any words, so values are often the likeliest answer."""
    torch.manual_seed(0)
    model, words = train.untrained(name).eval(), rows.Words.of(tokenizer)
    assert measure.induction_score(model, np.setdiff1d(np.arange(1, len(tokenizer)), words.all)) > 0.6
    assert measure.recall_accuracy(model, words, 4) > 0.3
