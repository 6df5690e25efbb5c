"""Page 14: what its views say is so, and its controls change them."""

import json

import pandas as pd
import pytest
import torch
from small_models import make

from vqkv.errors import DataError, UnknownNameError
from vqkv.study import explore, figures
from vqkv.study.explore import views
from vqkv.study.explore.controls import HEADLESS, Explorer
from vqkv.study.subject import Subject


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    return Subject(str(make("llama", tmp_path_factory.mktemp("llama"))), "python-stdlib", [6, 128], [2, 160])


def test_a_continuation_is_the_model_s_own_and_parts_where_the_compressed_cache_says_so(subject):
    table = explore.continuation(preset="quanto", bits=2, subject=subject, prompt=[0, 40], new_tokens=24)
    prompt, rows = subject.test[:1, :40], table[table["position"] >= 0].reset_index()
    how = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    (ids,) = subject.model.generate(prompt, attention_mask=torch.ones_like(prompt), **how)
    assert "".join(map(json.loads, rows["exact"])) == subject.tokenizer.decode(ids[40:])
    assert "".join(map(json.loads, table[table["position"] < 0]["exact"])) == subject.tokenizer.decode(prompt[0, -32:])
    assert (rows["kl"] > 10 * rows["kl_floor"]).all() and rows["kl_floor"].max() < 1e-5
    differs = rows["told"] != rows["exact"]
    first = differs.idxmax() if differs.any() else len(rows)
    assert (rows["alone"] == rows["told"])[: first + 1].all()  # until then it was told nothing else
    finer = explore.continuation(preset="quanto", bits=4, subject=subject, prompt=[0, 40], new_tokens=24)
    assert finer["kl"].mean() < rows["kl"].mean() / 4


@pytest.mark.parametrize("preset", explore.SYSTEMS)
def test_a_key_is_read_back_from_its_stages_as_the_compressor_reads_it(preset, subject):
    place = {"layer": 2, "head": 1, "token": 70}
    table = explore.stages(preset=preset, bits=2, subject=subject, prompt=[0, 140], **place).set_index("stage")
    compressor, _ = views.fitted(preset=preset, bits=2, subject=subject)
    known = compressor.new_pass()
    pairs = zip(*subject.exact.keys_and_values(subject.test[:1, :140], pre_rope=compressor.settings.pre_rope))
    keys = [(pair[0], compressor.reconstruct(layer, *pair, known)[0]) for layer, pair in enumerate(pairs)]
    key, read_back = (x[0, 1, 70] for x in keys[2])
    for name, column, expected in (("as it comes", "value", key), ("read back", "value", read_back),
                                   ("read back", "original", key)):  # fmt: skip
        assert torch.allclose(torch.tensor(table.loc[name, column].to_numpy()).float(), expected, atol=2e-3)
    codes = table.loc["codes", "value"]
    assert (codes == codes.round()).all() and len(codes) % 8 == 0
    assert list(table.index.unique())[-2:] == ["codes", "read back"] and figures.vector_stages(table.reset_index()).axes


def test_more_bits_explain_more_of_every_layer(subject):
    few, many = (explore.explained(preset="higgs", bits=bits, subject=subject)["evr"] for bits in (2, 4))
    assert len(few) == 6 and (few < many).all() and many.between(0.95, 1).all()


def test_what_cannot_be_shown_is_refused_with_the_remedy(subject):
    system, other = {"bits": 2, "subject": subject}, {"prompt": [0, 40], "new_tokens": 4}
    with pytest.raises(DataError, match="128 token.*write a longer one"):
        explore.continuation(preset="kivi", **system, **other)
    with pytest.raises(DataError, match="layer 3"):
        explore.stages(preset="quanto", **system, prompt=[0, 40], layer=3, head=0, token=0)
    with pytest.raises(UnknownNameError, match="Did you mean 'kivi'"):
        explore.explained(preset="kiwi", **system)
    with pytest.raises(DataError, match="5 bits"):
        explore.explained(preset="kivi", bits=5, subject=subject)


def test_text_is_escaped_and_other_tokens_are_marked():
    rows = [(-1, None, "<x>", "<x>", "<x>"), (0, 0.05, "a", "a", "b"), (1, 2.0, "\n", "&", "c")]
    table = pd.DataFrame(rows, columns=["position", "kl", "exact", "told", "alone"])
    told = table.assign(**{name: table[name].map(json.dumps) for name in ("exact", "told", "alone")})
    page = figures.coloured_text(told)
    assert page.count("&lt;x&gt;") == 3 and "<x>" not in page and "<u><b>&amp;</b></u>" in page and "↵<br>" in page
    assert "<u><b>b</b></u>c" in page  # by itself: the first alone is marked, on no ground
    assert page.count("#fec44f") == 1 and page.count("#ffefb0") == 3 and page.count("#993404") == 3  # and the legend


def test_controls_change_what_is_shown(subject):
    trained = subject.changed(name="vqkv/llama-mini")  # whose text changes with its cache
    explorer = Explorer("quanto", 2, trained, prompt=[0, 40], new_tokens=6, layer=0, head=0, token=30)
    shown = [explorer.text, explorer.vector, explorer.evr]

    def changed_by(control, value) -> list[bool]:
        before = [view.value for view in shown]
        control.value = value
        return [view.value != old for view, old in zip(shown, before, strict=True)]

    assert "variance of the keys of layer 0" in explorer.status.value
    assert (explorer.layer.max, explorer.head.max, explorer.token.max) == (5, 1, 39)
    assert changed_by(explorer.bits, 4) == [True, True, True]
    assert changed_by(explorer.preset, "higgs") == [True, True, True]
    assert changed_by(explorer.layer, 1) == changed_by(explorer.head, 1) == [False, True, False]
    assert changed_by(explorer.prompt, "import os\n" * 8) == [True, True, False]
    assert changed_by(explorer.preset, "kivi") == [False] * 3 and "write a longer one" in explorer.status.value
    assert changed_by(explorer.preset, "quanto") == [True] * 3 and "longer" not in explorer.status.value
    assert changed_by(explorer.model, "vqkv/gpt2-mini") == [True, True, True] and explorer.head.max == 3


def test_controls_are_there_only_where_somebody_can_turn_them(subject, monkeypatch, capsys):
    chosen = {"preset": "quanto", "bits": 2, "subject": subject, "prompt": [0, 40], "new_tokens": 6}
    chosen |= {"layer": 0, "head": 0, "token": 30}
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    assert explore.widgets(**chosen) is None and capsys.readouterr().out == HEADLESS + "\n"
    monkeypatch.setenv("JPY_SESSION_NAME", "14_explore.ipynb")
    assert len(explore.widgets(**chosen).children) == 7
    monkeypatch.setenv("VQKV_OUT", "out")
    assert explore.widgets(**chosen) is None


def test_the_calculator_s_controls_change_its_rows(monkeypatch):
    given = {"model": "meta-llama/Meta-Llama-3-8B", "context": 32768, "memory_gb": 24.0}
    assert "best-mid 0.5" in list(explore.calculator(**given)["system"])
    monkeypatch.setenv("JPY_SESSION_NAME", "14_explore.ipynb")
    monkeypatch.delenv("VQKV_OUT", raising=False)
    calculator = explore.calculator(**given)
    model, context, sequences, memory, _ = calculator.children

    def shown(**values) -> str:
        for name, value in values.items():
            {"model": model, "context": context, "sequences": sequences, "memory": memory}[name].value = value
        calculator.update()
        return calculator.result.to_string()

    before = shown()
    assert before != shown(sequences=2) and "best-long 0.5" in shown()
    assert "best-long 0.5" not in shown(memory=10.0)  # the weights alone are more
    assert "sliding window" in shown(model="mistralai/Mistral-7B-v0.1")
    assert "higgs 2" in shown(model="vqkv/llama-mini", context=512)
