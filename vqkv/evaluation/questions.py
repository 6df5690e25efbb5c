"""Questions about text, at known distances: facts hidden in it, which a chat model answers from its cache, and pairs of
words, of which one is asked for again."""

import itertools
import random
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from vqkv.errors import DataError

DIGITS = 5  # of a fact's number
STEMS = (  # a question repeats the beginning of its fact's sentence
    "The postal code of {place} is",
    "The number of visitors to the museum in {place} is",
    "The telephone number of the library in {place} is",
    "The population of the village of {place} is",
    "The seed of the experiment in {place} is",
    "The invoice number of the order from {place} is",
    "The locker number at the station in {place} is",
    "The distance in meters to the bridge of {place} is",
)
PLACES = (
    "Lisbon", "Oslo", "Prague", "Vienna", "Dublin", "Athens", "Warsaw", "Helsinki", "Madrid", "Rome", "Paris", "Berlin",
    "London", "Geneva", "Naples", "Milan", "Seville", "Porto", "Bergen", "Zurich", "Munich", "Hamburg", "Cologne",
    "Venice", "Florence", "Glasgow", "Oxford", "Boston", "Chicago", "Denver", "Dallas", "Seattle", "Toronto", "Sydney",
)  # fmt: skip
BEFORE = "Read this text. Facts are hidden in it.\n\n"
MARK = "\x00"
VOCABULARY = 128  # keys, and values; the earliest tokens of a BPE vocabulary are its most frequent
CHOICES = 4  # of a question
EARLIER = 8
WORD = re.compile(r"^[a-z]{3,9}$")


@dataclass(frozen=True)
class FactsBatch:
    """``tokens`` (n, seq_len), of which the first ``text_len`` stand before the first question; ``question``
    (n, seq_len), the number of the question, from 1, whose answer a token is part of (0 elsewhere)."""

    tokens: Tensor
    question: Tensor
    text_len: int


def facts_batch(tokenizer, num_facts: int, text: Tensor, text_len: int, seed: int) -> FactsBatch:
    """Write a conversation for each row of ``text`` (n, at least text_len): a text with ``num_facts`` facts of
    ``DIGITS`` digits between its sentences, ``text_len`` tokens, then a question about each fact in another order,
    answered.

    A needle-in-a-haystack test with several needles (Kamradt 2023; RULER, Hsieh et al. 2024, section 3), in the
    model's chat template where its tokenizer has one. Shorter rows end with copies of their last token. Raises
    ``DataError`` if so many facts leave no room for text."""
    rng = random.Random(f"facts/{seed}")
    special = set(tokenizer.all_special_ids)
    plain = [[token for token in row.tolist() if token not in special] for row in text]
    rows = [_conversation(tokenizer, num_facts, row, text_len, rng) for row in plain]
    longest = max(len(tokens) for tokens, _ in rows)
    padding = [longest - len(tokens) for tokens, _ in rows]
    tokens = torch.tensor([tokens + tokens[-1:] * more for (tokens, _), more in zip(rows, padding)])
    question = torch.tensor([question + [0] * more for (_, question), more in zip(rows, padding)])
    return FactsBatch(tokens, question, text_len)


def _conversation(tokenizer, count: int, text: list[int], text_len: int, rng) -> tuple[list[int], list[int]]:
    """Return tokens of one conversation, and of which question's answer each is a part."""
    stems = [
        STEMS[i % len(STEMS)].format(place=town)
        for i, town in enumerate(rng.sample(PLACES, count), rng.randrange(len(STEMS)))
    ]
    numbers = [str(rng.randrange(10 ** (DIGITS - 1), 10**DIGITS)) for _ in stems]
    asked = rng.sample(range(count), count)
    start, *turns, rest = _turns(tokenizer, [stems[i] for i in asked])
    facts = [_encode(tokenizer, f"\n\n{stem} {number}.\n\n") for stem, number in zip(stems, numbers)]
    fixed = len(start) + sum(map(len, facts))
    if fixed + count >= text_len:
        raise DataError(f"{count} facts take {fixed} of {text_len} tokens: hide fewer, or in more")
    tokens = start + _hidden(tokenizer, facts, text[: text_len - fixed], rng)
    question = [0] * len(tokens)
    for number, (fact, turn) in enumerate(zip(asked, turns), 1):
        answer = _encode(tokenizer, f" {numbers[fact]}")
        tokens += turn + answer
        question += [0] * len(turn) + [number] * len(answer)
    return tokens + rest, question + [0] * len(rest)


def _hidden(tokenizer, facts: list[list[int]], text: list[int], rng) -> list[int]:
    """Hide ``facts`` between lines or sentences of ``text``, one in each of as many parts of equal length."""
    words = [tokenizer.decode([token]) for token in text]
    ends = [
        i
        for i, (word, after) in enumerate(itertools.pairwise(words), 1)
        if word.endswith("\n") or (word.rstrip(" ").endswith((".", "!", "?")) and after[:1].isspace())
    ]
    tokens, done = list[int](), 0
    for number, fact in enumerate(facts):
        low, high = (len(text) * part // len(facts) for part in (number, number + 1))
        end = rng.choice([i for i in ends if low < i <= high] or [(low + high) // 2])
        tokens, done = tokens + text[done:end] + fact, end
    return tokens + text[done:]


def _turns(tokenizer, stems: list[str]) -> list[list[int]]:
    """Return tokens before the text, before the first answer, between answers, and after the last."""
    asked = [f"{stem.replace('The', 'What is the', 1).removesuffix(' is')}?" for stem in stems]
    if tokenizer.chat_template is None:
        parts = [f"\n\nQuestion: {question}\nAnswer: {stem}" for question, stem in zip(asked, stems)]
        conversation = BEFORE + MARK + MARK.join([*parts, "."])
    else:
        chat = []
        for number, (question, stem) in enumerate(zip(asked, stems)):
            said = f"{BEFORE}{MARK}\n\n{question}" if number == 0 else question
            chat += [{"role": "user", "content": said}, {"role": "assistant", "content": f"{stem}{MARK}."}]
        conversation = tokenizer.apply_chat_template(chat, tokenize=False)
    return [_encode(tokenizer, part) for part in conversation.split(MARK)]


def _encode(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def all_right(batch: FactsBatch, right: Tensor) -> Tensor:
    """Tell whether every token of an answer is right, bool (n, num_facts), from ``right``, one number for each token of
    ``batch.question`` that is not 0, in their order."""
    count, numbers = int(batch.question.max()), batch.question[batch.question > 0]
    rows = batch.question.nonzero()[:, 0]
    each = torch.ones(len(batch.question), count)
    return each.view(-1).scatter_reduce(0, rows * count + numbers - 1, right.float(), "amin").view_as(each).bool()


def recall_questions(tokenizer, distance: int, num_docs: int) -> list[dict]:
    """Write the same questions each time: ``context`` (lines of a key and its value, then one of the keys), ``choices``
    (its value and those of three other keys) and ``answer``, the right one's place. A value stands ``distance`` tokens
    before its answer, as nearly as complete lines allow; ``EARLIER`` pairs at most stand before it. Keys and values are
    words of one token each, so that distances are exact (Zoology, arXiv 2312.04927)."""
    words = single_token_words(tokenizer)[: 2 * VOCABULARY]
    keys, values = ([tokenizer.decode([word]) for word in half] for half in (words[::2], words[1::2]))
    newline, rng = tokenizer.encode("\n", add_special_tokens=False), random.Random(f"recall/{distance}")
    later, rows = round(distance / (len(newline) + 2)) - 1, []
    for _ in range(num_docs):
        pairs = later + 1 + rng.randrange(EARLIER + 1)
        asked, some_keys, some_values = pairs - 1 - later, rng.sample(keys, pairs), rng.sample(values, pairs)
        lines = "".join(f"{key}{value}{tokenizer.decode(newline)}" for key, value in zip(some_keys, some_values))
        right = some_values[asked]
        choices = [right, *rng.sample([value for value in some_values if value != right], CHOICES - 1)]
        rng.shuffle(choices)
        rows.append({"context": lines + some_keys[asked], "choices": choices, "answer": choices.index(right)})
    return rows


def single_token_words(tokenizer) -> list[int]:
    """List ids of tokens that are a space and a lower-case word, in byte-level or SentencePiece form."""
    vocabulary = tokenizer.get_vocab().items()
    return sorted(index for token, index in vocabulary if token[:1] in ("Ġ", "▁") and WORD.match(token[1:]))
