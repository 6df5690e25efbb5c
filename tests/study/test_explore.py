"""Page 14: what its views say is so, and its controls change them."""

import json

import pandas as pd
import pytest
import torch
from small_models import make

from vqkv import Compressor
from vqkv.cache.chat import Conversation
from vqkv.errors import DataError, UnknownNameError
from vqkv.study import explore, figures, steering, tables
from vqkv.study.explore import views
from vqkv.study.explore.controls import HEADLESS, Chat
from vqkv.study.subject import Subject

TURNS = [[0, 40], "import os", "def main"]


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    return Subject(str(make("llama", tmp_path_factory.mktemp("llama"))), "python-stdlib", [6, 140], [2, 160])


def test_a_conversation_is_what_the_compressed_cache_says_beside_an_uncompressed_one(subject):
    table = explore.conversation(["live", "fp16"], subject, TURNS, 8)
    talk = Conversation(subject.model, subject.tokenizer, views.fitted("live", subject))
    for turn, said in enumerate(TURNS, 1):
        rows = table[(table["system"] == "live") & (table["turn"] == turn)]
        made = talk.answer(json.loads(rows["text"].iloc[0]), 8, do_sample=False)
        answer = "".join(map(json.loads, rows["text"].iloc[1:]))
        assert made.shape[1] == rows["tokens"].iloc[0] and subject.tokenizer.decode(made[0]).endswith(answer)
        report = talk.cache.report()
        assert set(rows["resident_bytes"]) == {report.resident_bytes}
        assert set(rows["uncompressed_bytes"]) == {2 * report.dynamic_values}
        assert isinstance(said, list) or json.loads(rows["text"].iloc[0]) == said
    scored = table[table["role"] == "assistant"].groupby("system")
    assert scored["kl"].max()["fp16"] < 1e-5 and scored["uncompressed"].all()["fp16"]
    assert scored["kl"].mean()["live"] > 100 * scored["kl"].mean()["fp16"]


@pytest.mark.parametrize("system", explore.SYSTEMS)
def test_a_key_is_read_back_from_its_stages_as_the_compressor_reads_it(system, subject):
    tokens = subject.tokenizer(views._text(subject, [0, 140]), return_tensors="pt").input_ids
    table = explore.stages([system], subject, [0, 140], layer=2, head=1, token=70).set_index("stage")
    compressor = views.fitted(system, subject)
    known = compressor.new_pass()
    pairs = zip(*subject.exact.keys_and_values(tokens, pre_rope=compressor.settings.pre_rope))
    keys = [(pair[0], compressor.reconstruct(layer, *pair, known)[0]) for layer, pair in enumerate(pairs)]
    key, read_back = (x[0, 1, 70] for x in keys[2])
    for name, column, expected in (("as it comes", "value", key), ("read back", "value", read_back),
                                   ("read back", "original", key)):  # fmt: skip
        assert torch.allclose(torch.tensor(table.loc[name, column].to_numpy()).float(), expected, atol=2e-3)
    codes = table.loc["codes", "value"]
    assert (codes == codes.round()).all()
    assert list(table.index.unique())[-2:] == ["codes", "read back"]


def test_stages_of_two_systems_stand_in_one_order():
    stages = {"a": ["as it comes", "PCA", "codes", "read back"], "b": ["as it comes", "residual", "codes", "read back"]}
    rows = [(system, name, 0, 1.0, 1.0) for system, names in stages.items() for name in names]
    fig = figures.vector_stages(pd.DataFrame(rows, columns=["system", "stage", "place", "value", "original"]))
    shown = [ax.get_title(loc="left") for ax in fig.axes if ax.axison]
    assert [title.partition(":")[0] for title in shown] == [
        "a, as it comes", "b, as it comes", "PCA", "residual", "codes", "codes", "read back", "read back"
    ]  # fmt: skip


def test_a_finer_system_explains_more_of_every_layer(subject):
    table = explore.explained(["higgs", "fp16"], subject)
    few, all_of_it = (table[table["system"] == name]["evr"].to_numpy() for name in ("higgs", "fp16"))
    assert len(few) == 6 and (few < all_of_it).all() and (all_of_it > 0.9999).all() and (few > 0.5).all()


def test_what_cannot_be_shown_is_refused_with_the_remedy(subject):
    place = {"layer": 0, "head": 0, "token": 0}
    with pytest.raises(DataError, match="128 tokens together.*say more"):
        explore.stages(["kivi"], subject, [0, 40], **place)
    with pytest.raises(DataError, match="layer 3"):
        explore.stages(["quanto"], subject, [0, 40], **place | {"layer": 3})
    with pytest.raises(DataError, match="kvtc has no stages"):
        explore.stages(["kvtc"], subject, [0, 140], **place)
    with pytest.raises(UnknownNameError, match="Did you mean 'kivi'"):
        explore.explained(["kiwi"], subject)
    with pytest.raises(DataError, match="length of the passage"):
        explore.conversation(["quanto"], subject, [[0, 4000]], 4)


@pytest.mark.parametrize("name", ["conversation", "stages", "explained"])
def test_the_stored_tables_are_of_the_compressors_that_come_with_the_package(name):
    sources = tables.provenance(f"14_{name}")["sources"]
    for system in ("live", "best"):
        ready = Compressor.from_pretrained(f"vqkv/smollm2-135m-{system}")
        assert sources[f"compressor {system}"] == ready.fingerprint[:16]


def test_text_is_escaped_and_other_tokens_are_marked():
    shared = {"system": "live", "turn": 1, "tokens": 9, "resident_bytes": 2e6, "uncompressed_bytes": 1e6}
    told = [("<x>" + 400 * "y", None, True), ("a", 0.05, True), ("&", 2.0, False), ("\n", 0.0, True)]
    rows = [shared | {"text": json.dumps(text), "kl": kl, "uncompressed": same} for text, kl, same in told]
    page = figures.coloured_chat(pd.DataFrame(rows))
    assert "&lt;x&gt;" in page and "<x>" not in page and "[...]" in page and page.count("y") < 330
    assert "<u><b>&amp;</b></u>" in page and "<b>2.0 MB</b> in memory; uncompressed in 16 bits 1.0 MB" in page
    assert page.count("#fec44f") == 1 and page.count("#ffefb0") == 2 and page.count("#993404") == 2  # and the legend


def test_a_chat_goes_on_with_its_caches_and_begins_again_with_another_system(subject):
    chat = Chat(["quanto", "higgs"], subject, 6)
    chat.prompt.value = "import os"
    first = chat.text.value
    assert first.count("<td") == 2 and chat.prompt.value == chat.status.value == ""
    chat.prompt.value = "def main"
    assert first[-200:-20] in chat.text.value and [row["turn"] for row in chat.rows] == 2 * [1] * 7 + 2 * [2] * 7
    chat.prompt.value = "word " * 300
    assert "positions" in chat.status.value and "def main" in chat.text.value
    chat.systems[0].value = "hqq"
    assert chat.text.value == "" and not chat.talks


def test_controls_are_there_only_where_somebody_can_turn_them(subject, monkeypatch, capsys):
    shown = {"systems": ["quanto", "higgs"], "subject": subject}
    key = shown | {"turn": "import os", "layer": 0, "head": 0, "token": 1}
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    assert explore.chat(**shown, max_new_tokens=6) is None and capsys.readouterr().out == HEADLESS + "\n"
    assert explore.follow(**key) is None
    monkeypatch.setenv("JPY_SESSION_NAME", "14_explore.ipynb")
    assert len(explore.chat(**shown, max_new_tokens=6).children) == 4
    drawn = []
    monkeypatch.setattr(figures, "vector_stages", drawn.append)
    follow = explore.follow(**key)
    follow.children[1].value = 2
    follow.update()
    assert set(drawn[-1]["system"]) == {"quanto", "higgs"}
    monkeypatch.setattr(steering, "current", steering.Steering("out"))
    assert explore.chat(**shown, max_new_tokens=6) is None


def test_the_calculator_s_controls_change_its_rows(monkeypatch):
    given = {"model": "meta-llama/Meta-Llama-3-8B", "context": 32768, "memory_gb": 24.0}
    assert "best-mid 0.5" in list(explore.calculator(**given)["system"])
    monkeypatch.setenv("JPY_SESSION_NAME", "14_explore.ipynb")
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
