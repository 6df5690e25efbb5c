"""Page 14: what its views say is so, and its controls change them; and a conversation in the terminal."""

import json
from unittest.mock import Mock

import pytest
import torch

from vqkv import Compressor
from vqkv.errors import DataError, UnknownNameError
from vqkv.study import explore, tables
from vqkv.study.chat import Conversation, chat
from vqkv.study.explore import Chat
from vqkv.study.subject import Subject

TURNS = [[0, 40], "import os", "def main"]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def subject(llama_folder):
    return Subject(llama_folder, "python-stdlib", [6, 140], [2, 160])


def test_a_conversation_is_what_the_compressed_cache_says_beside_an_uncompressed_one(subject):
    table = explore.conversation(["live", "fp16"], subject, TURNS, 8)
    talk = Conversation(subject.model, subject.tokenizer, explore.fitted("live", subject))
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


@pytest.mark.parametrize("system", ["live", "best", "kivi"])
def test_a_key_is_read_back_from_its_stages_as_the_compressor_reads_it(system, subject):
    tokens = subject.tokenizer(explore._text(subject, [0, 140]), return_tensors="pt").input_ids
    table = explore.stages([system], subject, [0, 140], layer=2, head=1, token=70).set_index("stage")
    compressor = explore.fitted(system, subject)
    reconstructions = compressor.new_pass()
    pairs = zip(*subject.exact.keys_and_values(tokens, pre_rope=compressor.settings.pre_rope))
    keys = [(pair[0], compressor.reconstruct(layer, *pair, reconstructions)[0]) for layer, pair in enumerate(pairs)]
    key, read_back = (x[0, 1, 70] for x in keys[2])
    shown = [("as it comes", "value", key), ("read back", "value", read_back), ("read back", "original", key)]
    for name, column, expected in shown:
        assert torch.allclose(torch.tensor(table.loc[name, column].to_numpy()).float(), expected, atol=2e-3)
    codes = table.loc["codes", "value"]
    assert (codes == codes.round()).all()
    assert list(table.index.unique())[-2:] == ["codes", "read back"]


def test_what_cannot_be_shown_is_refused_with_the_remedy(subject):
    asked = [("kivi", 40, 0, "128 tokens together.*say more"), ("quanto", 40, 3, "layer 3")]
    for system, length, layer, message in [*asked, ("kvtc", 140, 0, "kvtc has no stages")]:
        with pytest.raises(DataError, match=message):
            explore.stages([system], subject, [0, length], layer=layer, head=0, token=0)
    with pytest.raises(UnknownNameError, match="Did you mean 'kivi'"):
        explore.explained(["kiwi"], subject)
    with pytest.raises(DataError, match="length of the passage"):
        explore.conversation(["quanto"], subject, [[0, 4000]], 4)


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


def test_what_the_model_reads_is_the_template_of_the_conversation(mini, monkeypatch):
    model, tokenizer = mini
    read, answer = [], torch.tensor([[*tokenizer("yes", add_special_tokens=False).input_ids, tokenizer.eos_token_id]])

    def generate(input_ids, **_):
        read.append(input_ids)
        return torch.cat([input_ids, answer], dim=1)

    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    monkeypatch.setattr(model, "generate", generate)
    chat(model, tokenizer, read=Mock(side_effect=["one", "two", ""]), write=Mock())
    messages = [("user", "one"), ("assistant", "yes"), ("user", "two")]
    said = [{"role": role, "content": content} for role, content in messages]
    assert tokenizer.decode(read[-1][0]) == tokenizer.apply_chat_template(said, tokenize=False)


def test_it_ends_where_positions_do_and_at_an_interrupt(mini):
    chat(*mini, read=Mock(return_value="word " * 2000), write=(write := Mock()))
    assert "positions" in write.call_args.args[0]
    chat(*mini, read=Mock(side_effect=KeyboardInterrupt))


@pytest.mark.parametrize("name", ["conversation", "stages", "explained"])
def test_the_stored_tables_are_of_the_compressors_that_come_with_the_package(name):
    sources = tables.provenance(f"14_{name}")["sources"]
    for system in ("live", "best"):
        ready = Compressor.from_pretrained(f"vqkv/smollm2-135m-{system}")
        assert sources[f"compressor {system}"] == ready.fingerprint[:16]
