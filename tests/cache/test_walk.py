"""The README's walk from a key to its bytes links to the lines where the named functions begin.

``python tests/cache/test_walk.py`` writes the right numbers."""

import ast
import re
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "vqkv/README.md"
LINK = re.compile(r"\[`([\w.]+)`\]\(([\w/]+\.py)#L(\d+)\)")


def line_of(path: Path, name: str) -> int:
    """Where a class, method or function is defined."""
    node: ast.AST = ast.parse(path.read_text())
    for part in name.split("."):
        node = next(each for each in ast.iter_child_nodes(node) if getattr(each, "name", None) == part)
    return node.lineno


def renumbered(text: str) -> str:
    """``text`` with the lines where its links' names are defined."""
    return LINK.sub(lambda link: f"[`{link[1]}`]({link[2]}#L{line_of(README.parent / link[2], link[1])})", text)


def test_links_lead_to_the_lines_of_their_names():
    text = README.read_text()
    assert len(LINK.findall(text)) >= 15
    assert LINK.findall(text) == LINK.findall(renumbered(text))


if __name__ == "__main__":
    README.write_text(renumbered(README.read_text()))
