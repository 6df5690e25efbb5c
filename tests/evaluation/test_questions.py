"""Facts hidden in text: every number stands once in the text and once in its answer."""

import pytest
import torch

import vqkv
from vqkv.errors import DataError
from vqkv.evaluation.questions import DIGITS, all_right, facts_batch

CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"


@pytest.fixture(scope="module")
def text(tokenizer):
    return vqkv.load_corpus("python", tokenizer, "validation", 900, 3, seed=1)


@pytest.mark.parametrize(("count", "template"), [(1, None), (3, CHAT), (9, None)])
def test_answers_stand_in_the_text(tokenizer, text, count, template, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    batch = facts_batch(tokenizer, count, text, 500, seed=5)
    assert batch.tokens.shape == batch.question.shape and not batch.question[:, :500].any() and batch.text_len == 500
    for tokens, question in zip(batch.tokens, batch.question):
        assert sorted(question[question > 0].unique().tolist()) == list(range(1, count + 1))
        for number in range(1, count + 1):
            at = (question == number).nonzero().flatten()
            answer = tokenizer.decode(tokens[at]).strip()
            assert len(answer) == DIGITS and answer.isdigit()
            stem = tokenizer.decode(tokens[:500]).partition(f" {answer}.")[0].rpartition("\n\n")[2]
            assert stem.startswith("The ") and stem.endswith(" is") and "\n" not in stem
            assert tokenizer.decode(tokens[: at[0]]).endswith(stem)  # what the answer goes on from
            assert tokenizer.decode(tokens).count(answer) == 2
    assert ("<assistant>" in tokenizer.decode(batch.tokens[0])) == (template is not None)


def test_the_same_seed_hides_the_same_facts_where_they_have_room(tokenizer, text):
    first, again, other = (facts_batch(tokenizer, 4, text, 500, seed) for seed in (1, 1, 2))
    assert torch.equal(first.tokens, again.tokens) and not torch.equal(first.tokens, other.tokens)
    with pytest.raises(DataError, match="8 facts take [0-9]+ of 120 tokens: hide fewer"):
        facts_batch(tokenizer, 8, text, 120, seed=0)


def test_an_answer_is_right_where_all_its_tokens_are(tokenizer, text):
    batch = facts_batch(tokenizer, 3, text, 600, seed=0)
    right = torch.ones(int((batch.question > 0).sum()))
    assert all_right(batch, right).all() and all_right(batch, right).shape == (3, 3)
    marked = (batch.question > 0).nonzero()
    wrong = next(i for i, (row, column) in enumerate(marked) if row == 1 and batch.question[row, column] == 2)
    right[wrong] = 0
    assert all_right(batch, right).tolist() == [[True] * 3, [True, False, True], [True] * 3]
