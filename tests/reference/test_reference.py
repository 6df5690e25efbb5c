"""The bundled models, their tokenizer and the script that trains them."""

import itertools
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

import vqkv
from vqkv.models.load import BUNDLED, describe
from vqkv.models.metrics import token_nll
from vqkv.reference import measure, rows, train
from vqkv.reference.data import token_bytes


@pytest.mark.parametrize("name", sorted(BUNDLED))
def test_bundled_models_are_what_the_study_needs(name):
    model, tokenizer = vqkv.load_model(name)
    about, config = describe(model), model.config
    assert about["num_layers"] >= 6 and about["shapes"][0][1:] == [64, 64] and config.max_position_embeddings >= 1024
    assert (BUNDLED[name] / "model.safetensors").stat().st_size <= 32e6
    if name == "vqkv/llama-mini":
        assert config.num_attention_heads >= 3 * about["shapes"][0][0] >= 6
        assert config.hidden_size >= 3 * about["shapes"][0][0] * 64  # or the predictors would be exact by algebra
    log = json.loads((BUNDLED[name] / "training.json").read_text())
    card = (BUNDLED[name] / "README.md").read_text()
    assert f"{log['tokens']:,} in" in card and f"**{log['released']['bits_per_byte']:.3f}**" in card
    assert sum(run["tokens"] for run in log["runs"]) == log["tokens"]
    text = "def add(a, b):\n    return a + b\n\n" + "# é日本\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize("name", sorted(BUNDLED))
def test_bundled_models_learned_their_text(name):
    """Far from chance (ln 4096 = 8.3 nats a token), and as good as the card says to within sampling."""
    model, tokenizer = vqkv.load_model(name)
    tokens = vqkv.load_corpus("python", tokenizer, "test", seq_len=1024, num_seqs=8)
    with torch.inference_mode():
        nll = token_nll(model(tokens).logits[:, :-1], tokens[:, 1:]).sum().item()
    bits = nll / np.log(2) / token_bytes(tokenizer)[tokens[:, 1:]].sum()
    log = json.loads((BUNDLED[name] / "training.json").read_text())
    assert bits < 1.35 * log["released"]["bits_per_byte"] < 2.4


@pytest.mark.parametrize("name", sorted(BUNDLED))
def test_bundled_models_recall(name):
    """With an exact cache, as the card says: pages that ask what a cache loses of it need models that have it."""
    model, tokenizer = vqkv.load_model(name)
    words = rows.Words.of(tokenizer)
    assert measure.recall_accuracy(model, words, 16, seed=1) > 0.9
    assert measure.recall_accuracy(model, words, 32, seed=1) > 0.7


@pytest.fixture
def data(tmp_path, tokenizer):
    ids = np.array(tokenizer("def f(x):\n    return x\n\ndef g(y):\n    print(y)\n" * 99)["input_ids"], dtype=np.uint16)
    for split in ("train", "validation"):
        (tmp_path / f"{split}.bin").write_bytes(ids.tobytes())
    return tmp_path


@pytest.fixture
def few(monkeypatch):
    """Steps of 128 tokens, and nothing measured."""
    monkeypatch.setattr(train, "SHAPES", [(0, [(2, 64)])])
    monkeypatch.setattr(train, "abilities", lambda *args, **kw: {})


def test_training_that_was_killed_goes_on_as_if_it_had_not_been(data, few):
    whole = train.trainer("gpt2-mini", data, 10 * 128)
    whole.train()
    shutil.rmtree(data / "gpt2-mini")
    first, again = (train.trainer("gpt2-mini", data, 10 * 128) for _ in range(2))
    first.add_callback(Killed())
    with pytest.raises(KeyboardInterrupt):
        first.train()
    again.train(resume_from_checkpoint=get_last_checkpoint(data / "gpt2-mini"))
    assert again.state.global_step == 10
    for one, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


class Killed(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 5:
            raise KeyboardInterrupt


def test_the_learning_rate_warms_up_and_decays_over_the_last_fifth(data, few, tokenizer):
    mixture = train.Mixture(rows.TokenStream(data / "train.bin", tokenizer), tokenizer, 1000 * 128)
    rates = [mixture.learning_rate(step) for step in range(len(mixture) + 1)]
    assert rates[:3] == [1 / 200, 2 / 200, 3 / 200] and set(rates[199:801]) == {1}
    assert rates[900] == pytest.approx(0.5) and rates[-1] == 0.01


def test_labels_stand_where_something_can_be_known(tokenizer, data):
    words, rng = rows.Words.of(tokenizer), np.random.default_rng(0)
    assert not set(words.keys) & set(words.values)
    text = rows.TokenStream(data / "train.bin", tokenizer)
    for _ in range(20):
        row, labels = rows.repeats(rng, 64, words.all)
        for at in np.flatnonzero(labels != rows.IGNORE):  # the pair stood there before
            assert (row[at - 1], row[at]) in set(itertools.pairwise(row[:at])) and labels[at] == row[at]
        row, labels = rows.recall(rng, 96, words, 4, text.span(rng, 30))
        (asked,) = np.nonzero(labels != rows.IGNORE)
        assert len(asked) >= 10 and asked[0] > 1 + 3 * 4 + 30
        for at in asked:
            assert row[at] == labels[at] and (row[at - 1], row[at]) in set(itertools.pairwise(row[: 1 + 3 * 4]))


def test_every_kind_of_row_is_a_function_of_the_step(tokenizer, data):
    text = rows.TokenStream(data / "train.bin", tokenizer)
    mixture, same = (train.Mixture(text, tokenizer, 10**6, times) for times in (1, 1))
    for step in range(8):
        first, again = mixture[step], same[step]
        assert all(torch.equal(first[name], again[name]) for name in first)
        assert first["input_ids"].shape == first["labels"].shape == mixture.shapes[step]
        assert ((first["labels"] == rows.IGNORE) | (first["labels"] == first["input_ids"])).all()
    assert (
        mixture.seen[-2] < 10**6 <= mixture.seen[-1] == sum(sequences * length for sequences, length in mixture.shapes)
    )


def test_the_loss_weighs_sequences_alike_however_few_their_labels():
    logits, labels = torch.randn(2, 9, 7, generator=torch.Generator().manual_seed(0)), torch.full((2, 9), rows.IGNORE)
    labels[0], labels[1, 4] = 3, 5
    found = train.next_token_loss(SimpleNamespace(logits=logits), labels)
    likelihood = logits.log_softmax(-1)
    assert found.item() == pytest.approx(-(likelihood[0, :-1, 3].mean() + likelihood[1, 3, 5]).item() / 2, rel=1e-5)


@pytest.mark.parametrize("name", sorted(train.CIRCUITS))
def test_models_begin_with_an_induction_head(name, tokenizer):
    """The best head looks at what followed a word before, of any words, so values are often the likeliest answer."""
    torch.manual_seed(0)
    model, words = train.untrained(name).eval(), rows.Words.of(tokenizer)
    for tokens in (words.all, np.setdiff1d(np.arange(1, len(tokenizer)), words.all)):
        assert measure.induction_score(model, tokens) > 0.6
    assert measure.recall_accuracy(model, words, 4) > 0.3


def test_what_is_measured_of_a_model_is_what_it_does(tokenizer, data):
    """A model that looks back for the first place of its token says every recall right, and attends one further on."""

    class LooksBack(torch.nn.Module):
        device = torch.device("cpu")

        def forward(self, input_ids, use_cache):
            logits = torch.zeros(*input_ids.shape, len(tokenizer))
            for row, ids in enumerate(input_ids.tolist()):
                for i, token in enumerate(ids):
                    before = [j for j in range(i) if ids[j] == token]
                    logits[row, i, ids[before[0] + 1] if before else 0] = 1.0
            return SimpleNamespace(logits=logits)

    words = rows.Words.of(tokenizer)
    assert measure.recall_accuracy(LooksBack(), words, 4, rows=3) == 1.0
    fresh = LlamaForCausalLM(train.untrained("llama-mini").config).float()
    assert measure.recall_accuracy(fresh, words, 4, rows=3) < 0.3
    assert 0 < measure.induction_score(fresh, words.all, length=16) < 0.5
    text = rows.TokenStream(data / "validation.bin", tokenizer)
    bits = measure.bits_per_byte(fresh, text, token_bytes(tokenizer), seq_len=64, windows=4)
    sizes = token_bytes(tokenizer)[text.ids].mean()
    assert bits == pytest.approx(12 / sizes, rel=0.1)  # 4,096 tokens, all as likely


def test_a_release_loads_in_transformers_with_its_log(data, few, tmp_path, monkeypatch):
    little = {"windows": 2, "rows": 2}
    monkeypatch.setattr(train, "abilities", lambda *args, **kw: measure.abilities(*args, **kw | little))
    trainer = train.trainer("llama-mini", data, 2 * 128)
    trainer.train()
    train.release(trainer, tmp_path / "out", trainer.eval_dataset)
    model, _ = vqkv.load_model(str(tmp_path / "out"))
    assert torch.equal(model.lm_head.weight, trainer.model.lm_head.weight.half().float())
    log = json.loads((tmp_path / "out" / "training.json").read_text())
    assert log["released"]["bits_per_byte"] > 0 and log["tokens"] == 256
    assert {entry["step"] for entry in log["log"] if "recall" in entry} == {0, 1, 2}
