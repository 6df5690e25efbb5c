"""Plain English: no sentence of more than 25 words on pages and in READMEs, and the field's words everywhere."""

import ast
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "notebooks").glob("*.ipynb"))
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("*/README.md"))]
TEXTS += sorted((ROOT / "vqkv").glob("*/README.md"))
MODULES = sorted((ROOT / "vqkv").rglob("*.py"))
LONGEST = 25  # words, what stands in parentheses or code apart
DIALECT = (
    "all told", "anew", "nobody", "told apart", "unturned", "what is left", "RoPE turns", "turned back",
    "steps of one size",
)  # fmt: skip


def prose(text: str) -> list[str]:
    """The sentences of Markdown, without tables, headings, code and parentheses."""
    text, sentences = re.sub(r"```.*?```", "", text, flags=re.DOTALL), []
    for block in re.split(r"\n\s*\n|\n(?=[-*|#] ?|\d+\. )", text):
        if block.strip().startswith(("|", "#")):
            continue
        block = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"^\s*(?:[-*]|\d+\.) ", "", block))
        block = re.sub(r"\([^()]*\)", "", re.sub(r"`[^`]*`", "x", block)).replace("**", "")
        sentences += re.split(r"(?<=[.!?:;])[\"”]?\s+", " ".join(block.split()))
    return sentences


def markdown(path: Path) -> str:
    """A text, or the text of a page."""
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def docstrings(path: Path) -> str:
    """All docstrings of a module."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)]
    return "\n".join(" ".join((ast.get_docstring(node) or "").split()) for node in nodes)


@pytest.mark.parametrize("path", [*PAGES, *TEXTS], ids=lambda path: path.parent.name + "/" + path.stem)
def test_sentences_are_short_and_of_the_field_s_words(path):
    text = markdown(path)
    sentences = prose(text)
    assert sentences and not [sentence for sentence in sentences if len(sentence.split()) > LONGEST]
    assert not re.findall(rf"\b(?:{'|'.join(DIALECT)})", text)


def test_docstrings_use_the_field_s_words():
    words_of = {path: re.findall(rf"\b(?:{'|'.join(DIALECT)})", docstrings(path)) for path in MODULES}
    assert not {path.name: words for path, words in words_of.items() if words}
