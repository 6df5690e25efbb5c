"""The bundled models, their tokenizer and the script that trains them."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

import vqkv
from vqkv.models.load import BUNDLED, describe
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
        nll = vqkv.evaluation.metrics.token_nll(model(tokens).logits[:, :-1], tokens[:, 1:]).sum().item()
    bits = nll / np.log(2) / token_bytes(tokenizer)[tokens[:, 1:]].sum()
    log = json.loads((BUNDLED[name] / "training.json").read_text())
    assert bits < 1.35 * log["released"]["bits_per_byte"] < 2.4


@pytest.mark.parametrize("name", sorted(BUNDLED))
def test_bundled_models_recall(name):
    """With an exact cache, as the card says: pages that ask what a cache loses of it need models that have it."""
    model, tokenizer = vqkv.load_model(name)
    words = rows.Words.of(tokenizer)
    assert measure.recall_accuracy(model, words, 16, seed=1)[0] > 0.9
    assert measure.recall_accuracy(model, words, 32, seed=1)[0] > 0.7


@pytest.fixture
def data(tmp_path, tokenizer):
    ids = np.array(tokenizer("def f(x):\n    return x\n\ndef g(y):\n    print(y)\n" * 99)["input_ids"], dtype=np.uint16)
    for split in ("train", "validation"):
        (tmp_path / f"{split}.bin").write_bytes(ids.tobytes())
    return tmp_path


def test_training_that_was_killed_goes_on_as_if_it_had_not_been(data, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "SHAPES", [(0, [(2, 64)])])
    monkeypatch.setattr(train, "abilities", lambda *args, **kw: {})
    whole, first = (train.Trainer("gpt2-mini", "cpu", data, tmp_path / name, 10 * 128) for name in ("whole", "killed"))
    whole.run()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        steps = iter(range(5))
        step = first.step
        patch.setattr(first, "step", lambda: step() if next(steps, None) is not None else _interrupt())
        patch.setattr(train, "SAVE_SECONDS", 0)
        first.run()
    second = train.Trainer("gpt2-mini", "cpu", data, tmp_path / "killed", 10 * 128)
    assert second.log["tokens"] == 5 * 128
    second.run()
    for one, other in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert [run["tokens"] for run in second.log["runs"]] == [5 * 128, 5 * 128]
    assert (tmp_path / f"whole-{7 * 128}" / "model.safetensors").exists()  # from before the decay


def _interrupt():
    raise KeyboardInterrupt


def test_labels_stand_where_something_can_be_known(tokenizer, data):
    words, rng = rows.Words.of(tokenizer), np.random.default_rng(0)
    assert not set(words.keys) & set(words.values)
    text = rows.TokenStream(data / "train.bin", tokenizer)
    for _ in range(20):
        row, labels = rows.repeats(rng, 64, words.all)
        for at in np.flatnonzero(labels != rows.IGNORE):  # the pair stood there before
            assert (row[at - 1], row[at]) in set(itertools.pairwise(row[:at])) and labels[at] == row[at]
        row, labels, distance = rows.recall(rng, 96, words, 4, text.span(rng, 30))
        for at in np.flatnonzero(labels != rows.IGNORE):
            assert row[at] == labels[at] == row[at - distance[at]] and row[at - 1] == row[at - distance[at] - 1]
        assert (labels != rows.IGNORE).sum() >= 10 and (distance > 0).sum() == (labels != rows.IGNORE).sum()
    with pytest.raises(ValueError, match="leave no room"):
        rows.recall(rng, 24, words, 8)


def test_every_kind_of_row_is_a_function_of_the_seed(tokenizer, data):
    mixture = train.Mixture(data, tokenizer)
    for seed in range(8):
        first, again = (mixture.batch(6, 128, 10**6, seed) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert first[0].shape == first[1].shape == (6, 128)
        assert ((first[1] == rows.IGNORE) | (first[1] == first[0])).all()
    assert not torch.equal(mixture.batch(6, 128, 10**6, 0)[0], mixture.batch(6, 128, 10**6, 1)[0])


@pytest.mark.parametrize("name", sorted(train.ARCHITECTURES))
def test_models_begin_with_an_induction_head(name, tokenizer):
    """The best head looks at what followed a word before, of any words, so values are often the likeliest answer."""
    torch.manual_seed(0)
    model, words = train.ARCHITECTURES[name]().eval(), rows.Words.of(tokenizer)
    for tokens in (words.all, np.setdiff1d(np.arange(1, len(tokenizer)), words.all)):
        assert measure.induction_score(model, tokens) > 0.6
    assert measure.recall_accuracy(model, words, 4)[0] > 0.3


def test_what_is_measured_of_a_model_is_what_it_does(tokenizer, data):
    """A model that looks back for the last place of its token says every recall right, and attends one further on."""

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
    accuracy, queries, distance = measure.recall_accuracy(LooksBack(), words, 4, rows=3)
    assert accuracy == 1.0 and queries == 12 and 0 < distance < 24
    untrained = LlamaForCausalLM(train.ARCHITECTURES["llama-mini"]().config)
    assert measure.recall_accuracy(untrained, words, 4, rows=3)[0] < 0.3
    assert 0 < measure.induction_score(untrained, words.all, length=16) < 0.5
    text = rows.TokenStream(data / "validation.bin", tokenizer)
    bits = measure.bits_per_byte(untrained, text, token_bytes(tokenizer), seq_len=64, windows=4)
    sizes = token_bytes(tokenizer)[text.ids].mean()
    assert bits == pytest.approx(12 / sizes, rel=0.1)  # 4,096 tokens, all as likely


def test_a_release_loads_in_transformers_with_its_log(data, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "SHAPES", [(0, [(2, 64)])])
    monkeypatch.setattr(
        train, "abilities", lambda *args, **kw: measure.abilities(*args, **kw | {"windows": 2, "rows": 2})
    )
    trainer = train.Trainer("llama-mini", "cpu", data, tmp_path / "state", 2 * 128)
    monkeypatch.setattr(train, "MEASURE_TOKENS", 128)
    trainer.run()
    trainer.release(tmp_path / "out", rows.TokenStream(data / "validation.bin", trainer.tokenizer))
    model, _ = vqkv.load_model(str(tmp_path / "out"))
    assert torch.equal(model.lm_head.weight, trainer.model.lm_head.weight.half().float())
    log = json.loads((tmp_path / "out" / "training.json").read_text())
    assert log["released"]["bits_per_byte"] > 0 and len(log["measured"]) == 3
