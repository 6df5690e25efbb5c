"""The three splits of the bundled text: disjoint, no twin across them, what the rule gives."""

from collections import Counter

import pytest

from vqkv.data import bundled
from vqkv.data.bundled import CORPORA, documents
from vqkv.reference import splitting

PART = "00"  # first hex digits of the training documents that are compared


@pytest.fixture(scope="module")
def listed():
    """(split, module, text) of each document of source that is listed."""
    split_of = {name: split for split in bundled.SPLITS for name in bundled.listed(split)}
    read = ((document.module, document.text()) for document in CORPORA["python"]())
    named = {bundled.content_hash(text): (module, text) for module, text in read if text}
    return {name: (split_of[name], *about) for name, about in named.items() if name in split_of}


def test_documents_are_where_the_rule_deals_them(listed):
    assert all(bundled.dealt(module) == split for split, module, _ in listed.values())


def test_no_held_out_document_has_a_twin(listed):
    """Over all that is held out, and over the training documents that begin like ``PART``."""
    test = {name: text for name, (split, _, text) in listed.items() if split == "test"}
    twins = splitting.Twins(test.items())
    for name, (split, _, text) in listed.items():
        if split == "validation" or (split == "train" and name.startswith(PART)):
            assert not twins.of(text), f"{name} of {split} has a twin in the test split"


def test_twins_are_found_and_others_are_not(listed):
    texts = [text for _, _, text in listed.values() if 3_000 < len(text) < 9_000][:40]
    twins = splitting.Twins((str(i), text) for i, text in enumerate(texts))
    for i, text in enumerate(texts):
        lines = text.splitlines(keepends=True)
        assert str(i) in twins.of("".join(line for n, line in enumerate(lines) if n % 25))  # a vendored, edited copy
        assert str(i) not in twins.of("".join(lines[: len(lines) // 4]))


def test_a_patch_release_moves_nothing(monkeypatch, tmp_path):
    """A changed file is in no split, and the others keep their place and order."""
    before = [text for text, _ in zip(documents("python-stdlib", "train"), range(40))]
    changed = {before[3], before[17]}
    read = bundled.Document.text

    def patched(self):
        text = read(self)
        return text + "# 3.11.99\n" if text in changed else text

    monkeypatch.setattr(bundled.Document, "text", patched)
    after = [text for text, _ in zip(documents("python-stdlib", "train"), range(38))]
    assert after == [text for text in before if text not in changed]


def test_prose_is_prose_and_comes_once():
    counts = Counter(text for text, _ in zip(documents("prose", "validation"), range(4)))
    assert max(counts.values()) == 1 and all(len(text) >= bundled.MIN_PROSE for text in counts)
