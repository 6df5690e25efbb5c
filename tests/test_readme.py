"""The code of every README runs, and their numbers are those of the committed tables. They and pages are plain English:
no sentence of more than 25 words, and the field's words."""

import ast
import json
import re
from pathlib import Path

import pandas as pd
import pytest

from vqkv.data.bundled import CORPORA, PACKAGES, SPLITS, listed
from vqkv.data.corpus import HUB_CORPORA
from vqkv.models.load import BUNDLED
from vqkv.study.experiments.frontier import CONTEXTS
from vqkv.study.experiments.rule import by_rule, cache_shape

ROOT = Path(__file__).resolve().parent.parent
PATHS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("*/README.md"))]
PATHS += sorted(ROOT.glob("vqkv/*/README.md"))
TEXTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in PATHS}
TEXT = "\n".join(TEXTS.values())
PAGES = {f"notebooks/{path.name}": json.loads(path.read_bytes()) for path in sorted(ROOT.glob("notebooks/*.ipynb"))}
PROSE = TEXTS | {
    name: "\n\n".join("".join(cell["source"]) for cell in page["cells"] if cell["cell_type"] == "markdown")
    for name, page in PAGES.items()
}
LONGEST = 25  # words, what stands in parentheses or code apart
DIALECT = (
    "all told", "anew", "nobody", "told apart", "unturned", "what is left", "RoPE turns", "turned back",
    "steps of one size",
)  # fmt: skip
TIMED = {
    ("rvq_encode", "residual 8x2048 d=32"): "encode: residual VQ, 8x2048",
    ("rvq_decode", "residual 8x2048 d=32"): "decode: residual VQ, 8x2048",
    ("affine_encode", "int4"): "encode: int4",
    ("affine_decode", "int4"): "decode: int4",
    ("grid_encode", "grid 256"): "encode: HIGGS, 256 points",
}


def test_code_runs(tmp_path, monkeypatch):
    """But for the first example, which ``test_wheel`` runs."""
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[1:]:
        exec(compile(block, "README.md", "exec"), {})


def what_to_use(table: pd.DataFrame, budgets: list[float]) -> pd.DataFrame:
    """The system of the least KL within each budget of bits, side information included, by length of one context."""
    groups = table.groupby(["system", "nominal_bits"], sort=False)
    kl, floor = groups["kl_mean"].mean(), table["kl_floor"].max()

    def least(bits: pd.Series, budget: float) -> str:
        fits = kl[bits <= budget]
        if fits.empty:
            return "none"
        (system, nominal), loss = fits.idxmin(), f"{fits.min():.2g}" if fits.min() > floor else "at the fp16 floor"
        return f"{system}, {nominal:g} bits: {loss}" if nominal else f"{system}: {loss}"

    cells = {name: [least(groups[f"bits_{name}_x1"].max(), budget) for budget in budgets] for name in CONTEXTS}
    return pd.DataFrame(cells, index=budgets)


def test_the_table_of_what_to_use_is_the_committed_one():
    """In each cell what ``best`` takes there, and the best other system."""
    table = pd.read_csv(ROOT / "results/11_frontier.csv")
    rows = by_rule(table, list(CONTEXTS), cache_shape("smollm2-135m").width)
    mine = rows["family"] == "best"
    budgets = [1, 1.5, 2, 3, 4]
    best, others = what_to_use(rows[mine], budgets), what_to_use(table[~mine], budgets)
    for budget in budgets:
        cells = [f"{a}<br>{b}" for a, b in zip(best.loc[budget], others.loc[budget], strict=True)]
        line = f"| {budget:g} | {' | '.join(cells)} |"
        line = re.sub(r"(best-\w+), ", r"`\1` ", line).replace(" bits:", ":")
        assert line in TEXT, line


def test_the_bench_table_is_the_committed_one():
    table = pd.read_csv(ROOT / "results/09_speed.csv")
    for (operation, form), label in TIMED.items():
        rows = table[(table["operation"] == operation) & (table["format"] == form)]
        rows = rows[rows["bound_ms"] == rows["bound_ms"].max()]
        ours = rows[rows["implementation"].str.startswith("vqkv")]["median"].item()
        for row in rows.itertuples():
            line = f"| {label} | {row.implementation} | {row.median:.2f} | {row.median / ours:.1f}x |"
            assert line in TEXT, line


@pytest.mark.parametrize("name", sorted(BUNDLED))
def test_the_models_table_is_what_the_cards_say(name):
    log = json.loads((BUNDLED[name] / "training.json").read_text())
    tokens, bits = log["tokens"] / 1e6, log["released"]["bits_per_byte"]
    assert re.search(rf"\| `{name}` \|.*\| {tokens:.1f}M \| {bits:.3f} \|", TEXT)


def test_the_data_card_is_that_of_the_splits_and_of_all_data_sets():
    card = TEXTS["vqkv/data/README.md"]
    assert all(f"| {split} | {len(listed(split)):,} |" in card for split in SPLITS)
    assert all(f"| `{name}` |" in card for name in (*CORPORA, *HUB_CORPORA))
    assert f"the {len(PACKAGES)} packages" in card and sum(bool(word.strip("|-")) for word in card.split()) <= 400


@pytest.mark.parametrize("name", TEXTS)
def test_every_link_to_a_file_leads_somewhere(name):
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", TEXTS[name]):
        path = (ROOT / name).parent / target if target else ROOT / name
        assert path.exists(), target
        if anchor and path.suffix == ".md":  # lines of code are checked in tests/cache/test_walk.py
            heads = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads}


def test_the_readme_is_short_lists_every_page_and_scores_the_sources():
    assert len(TEXTS["README.md"].split()) <= 800
    claims = pd.read_csv(ROOT / "results/12_claims.csv")
    verdicts = ("holds", "holds in part", "does not hold")
    for _, rows in claims[claims["verdict"] != "our re-baselining"].groupby("source", sort=False):
        cells = [
            ", ".join(str(((rows["how"] == how) & (rows["verdict"] == verdict)).sum()) for verdict in verdicts)
            for how in ("arithmetic", "measured here")
        ]
        assert f" | {' | '.join(cells)} | {(rows['verdict'] == 'needs their model').sum()} |" in TEXTS["README.md"]
    assert f"which of {(claims['verdict'] != 'our re-baselining').sum()} published claims hold" in TEXTS["README.md"]
    assert not [name for name in PAGES if f"]({name})" not in TEXTS["README.md"]]


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


@pytest.mark.parametrize("name", PROSE)
def test_sentences_are_short_and_of_the_field_s_words(name):
    text = PROSE[name]
    sentences = prose(text)
    assert sentences and not [sentence for sentence in sentences if len(sentence.split()) > LONGEST]
    assert not re.findall(rf"\b(?:{'|'.join(DIALECT)})", text)


def test_docstrings_use_the_field_s_words():
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for path in ROOT.glob("vqkv/**/*.py"):
        nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)]
        text = "\n".join(" ".join((ast.get_docstring(node) or "").split()) for node in nodes)
        assert not re.search(rf"\b(?:{'|'.join(DIALECT)})", text), path
