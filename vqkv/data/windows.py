"""Texts -> windows of token ids, as they come: what is left of one piece of text begins the next."""

import hashlib
import json
import random
from collections.abc import Iterator

PACKINGS = ("windows", "packed", "joined")
BLANK_LINE = "\n\n"
BATCH = 64  # texts tokenised at a time
TAIL = 400  # characters that follow a place where joined text is cut, so that what follows is known


def cutter(packing: str, tokenizer, seq_len: int, rng: random.Random):
    """``add(texts)`` gives the windows, lists of ``seq_len`` token ids, that these texts complete, ``finish()`` those
    at the end."""
    if packing == "windows":
        return Windows(tokenizer, seq_len, rng)
    return (Joined if packing == "joined" else Packed)(tokenizer, seq_len)


class Windows:
    """One window a document, at a random offset; short documents are packed together, separated by EOS."""

    def __init__(self, tokenizer, seq_len: int, rng: random.Random):
        self.tokenizer, self.seq_len, self.rng = tokenizer, seq_len, rng
        self.head = _head(tokenizer)
        self.buffer: list[int] = []

    def add(self, texts: list[str]) -> list[list[int]]:
        """Windows that these texts complete."""
        return [row for text in texts for row in self._add(text)]

    def finish(self) -> list[list[int]]:
        """None: what is left is shorter than a window."""
        return []

    def _add(self, text: str) -> Iterator[list[int]]:
        body, eos = self.seq_len - len(self.head), self.tokenizer.eos_token_id
        self.buffer += self._piece(text)
        while len(self.buffer) >= body:
            yield self.head + self.buffer[:body]
            self.buffer = []  # the rest of a cut piece would give its document a second window
        if self.buffer and eos is not None:
            self.buffer.append(eos)

    def _piece(self, text: str) -> list[int]:
        """At most ``seq_len`` tokens of a document, from a random offset on."""
        # Tokenising a whole book to use one window of it would cost minutes: 16 characters a token is never exceeded
        # on average, so a slice that long is enough.
        start = self.rng.randrange(max(1, len(text) - 16 * self.seq_len))
        start = text.rfind("\n", 0, start) + 1
        return _ids(self.tokenizer, [text[start : start + 16 * self.seq_len]])[0][: self.seq_len]


class Packed:
    """Whole documents, each followed by EOS, cut into consecutive windows that start with BOS."""

    def __init__(self, tokenizer, seq_len: int):
        self.tokenizer, self.seq_len, self.head = tokenizer, seq_len, _head(tokenizer)
        self.buffer: list[int] = []

    def add(self, texts: list[str]) -> list[list[int]]:
        """Windows that these texts complete."""
        eos = self.tokenizer.eos_token_id
        for i in range(0, len(texts), BATCH):
            for ids in _ids(self.tokenizer, texts[i : i + BATCH]):
                self.buffer += ids if eos is None else [*ids, eos]
        return self._full()

    def finish(self) -> list[list[int]]:
        """None: what is left is shorter than a window."""
        return []

    def _full(self) -> list[list[int]]:
        body = self.seq_len - len(self.head)
        end = len(self.buffer) - len(self.buffer) % body
        rows = [self.head + self.buffer[i : i + body] for i in range(0, end, body)]
        self.buffer = self.buffer[end:]
        return rows


class Joined(Packed):
    """Rows joined by blank lines and tokenised as the one text that they make, a piece at a time.

    A piece ends where a line does, and only where the tokens of what follows are the same with and without what comes
    before: then the pieces' tokens are those of the whole.
    """

    def __init__(self, tokenizer, seq_len: int):
        super().__init__(tokenizer, seq_len)
        self.head = []
        self.text: str | None = None  # not tokenised yet; None before the first row
        self.begun = False  # True once text before it was

    def add(self, texts: list[str]) -> list[list[int]]:
        """Windows that these rows complete."""
        self.text = BLANK_LINE.join(texts if self.text is None else [self.text, *texts])
        whole = self._tokens(self.text, self.begun)
        for place in _line_starts(self.text):
            rest = self._tokens(self.text[place:], True)
            if 0 < len(rest) < len(whole) and whole[-len(rest) :] == rest:
                self._take(whole[: -len(rest)])
                self.text = self.text[place:]
                break
        return self._full()

    def finish(self) -> list[list[int]]:
        """Windows of the text that is left."""
        if self.text:
            self._take(self._tokens(self.text, self.begun))
        self.text = ""
        return self._full()

    def _tokens(self, text: str, begun: bool) -> list[int]:
        """Of ``text`` at the beginning, or after a line's end."""
        if not begun:
            return _ids(self.tokenizer, [text])[0]
        newline, ids = _ids(self.tokenizer, ["\n", "\n" + text])
        return ids[len(newline) :] if ids[: len(newline)] == newline else []

    def _take(self, ids: list[int]) -> None:
        if not self.begun and self.tokenizer("a", verbose=False)["input_ids"][:1] == _head(self.tokenizer):
            self.buffer += _head(self.tokenizer)
        self.buffer += ids
        self.begun = True


def _line_starts(text: str) -> Iterator[int]:
    """Where a text that goes on for ``TAIL`` characters can be cut: after the end of a line, the last first."""
    place, tried = len(text) - TAIL, 0
    while tried < 20 and (place := text.rfind("\n", 0, max(0, place))) >= 0:
        if text[place + 1] != "\n":
            tried += 1
            yield place + 1


def tokenizer_hash(tokenizer) -> str:
    """Sha256 of what a tokenizer does: its serialised content and special tokens, not its name."""
    if tokenizer.is_fast:
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        content |= {"truncation": None, "padding": None}  # set by calls, and off where a corpus is tokenised
    else:
        content = {"class": type(tokenizer).__name__, "vocab": tokenizer.get_vocab()}
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id]
    return hashlib.sha256(json.dumps([content, special], sort_keys=True).encode()).hexdigest()


def _head(tokenizer) -> list[int]:
    return [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]


def _ids(tokenizer, texts: list[str]) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
