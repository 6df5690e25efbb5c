"""A conversation of some turns, with a cache that holds all of it."""

import pytest
import torch

from vqkv import calibrate, load_corpus, presets
from vqkv.study.chat import chat

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}<assistant>"


def talk(model, tokenizer, compressor, *turns):
    said, written = iter(turns), []
    chat(model, tokenizer, compressor, lambda _: next(said, ""), 8, written.append)
    return written


@pytest.fixture
def templated(mini):
    model, tokenizer = mini
    before, tokenizer.chat_template = tokenizer.chat_template, TEMPLATE
    yield model, tokenizer
    tokenizer.chat_template = before


@pytest.mark.parametrize("preset", [None, presets.fp16()], ids=["uncompressed", "fp16"])
def test_every_turn_goes_on_with_the_same_cache(templated, preset):
    model, tokenizer = templated
    text = load_corpus("python", tokenizer, "train", 64, 2, 0)
    compressor = preset and calibrate(model, text, preset, progress=False)
    lines = talk(model, tokenizer, compressor, "def main", "import", "return")
    lengths = [int(line.split()[0].strip("[").replace(",", "")) for line in lines]
    assert len(lines) == 3 and lengths == sorted(lengths) and "uncompressed in 16 bits" in lines[0]


def test_what_the_model_reads_is_the_template_of_the_conversation(templated, monkeypatch):
    model, tokenizer = templated
    read, answer = [], torch.tensor([[*tokenizer("yes", add_special_tokens=False).input_ids, tokenizer.eos_token_id]])

    def generate(input_ids, **_):
        read.append(input_ids)
        return torch.cat([input_ids, answer], dim=1)

    monkeypatch.setattr(model, "generate", generate)
    talk(model, tokenizer, None, "one", "two")
    messages = [("user", "one"), ("assistant", "yes"), ("user", "two")]
    chat = [{"role": role, "content": content} for role, content in messages]
    assert tokenizer.decode(read[-1][0]) == tokenizer.apply_chat_template(chat, tokenize=False)


def test_it_ends_where_positions_do(mini):
    model, tokenizer = mini
    assert "positions" in talk(model, tokenizer, None, "word " * 2000)[-1]


def test_an_interrupt_ends_it(mini):
    def interrupted(_):
        raise KeyboardInterrupt

    chat(*mini, None, interrupted)
