"""The calculator of the report: ``vqkv.recommend`` as a form that computes in the reader's browser."""

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import nbformat

from vqkv.errors import DataError
from vqkv.evaluation.capacity import architecture
from vqkv.evaluation.recommend import Candidate, candidates
from vqkv.models.configs import KNOWN_CONFIGS, config_of

TEMPLATES = Path(__file__).parent / "templates"
ABOUT = """# Which one for my model?

**Question.** Which ways of storing a cache fit a model, a context and a memory? Bytes follow from the model's shape.
Losses are page 11's, on two small models that favour transform coders (*short*, *long*, KVTC): measure yours with
`vqkv.evaluate`. For a model that is not listed: `vqkv recommend FOLDER_OR_HUB_NAME`.

Bold rows fit, and no other row that fits has no more bits all told and no more KL on either model. KL is in nats,
recall lost in points. From *break-even* on the cache of one sequence is smaller than in fp16, side information
included. *Longest* is what fits beside the weights, GB being 10⁹ bytes. Time is what a step takes longer than with
`DynamicCache`, on one CPU thread in fp32; blank: not timed."""


def page() -> nbformat.NotebookNode:
    """A page of one form and one table."""
    form, script = ((TEMPLATES / f"calculator.{kind}").read_text() for kind in ("html", "js"))
    data = f'<script type="application/json" id="known">{json.dumps(known())}</script>'
    shown = nbformat.v4.new_output("display_data", {"text/html": f"{form}{data}<script>{script}</script>"})
    cells = [nbformat.v4.new_markdown_cell(ABOUT), nbformat.v4.new_code_cell("", outputs=[shown])]
    return nbformat.v4.new_notebook(cells=cells, metadata={"title": "Which one for my model?"})


def known() -> dict[str, list[dict]]:
    """Model -> numbers of its candidates. Without models whose layers have a sliding window."""
    found = {}
    for name in KNOWN_CONFIGS:
        with suppress(DataError):
            model = architecture(config_of(name))
            found[name] = [_numbers(candidate) for candidate in candidates(model, 1)]
    return found


def _numbers(candidate: Candidate) -> dict:
    """All but the call; bytes of a block as a number, and None, as in JSON, for what was not measured."""
    numbers = asdict(candidate.needed) | candidate.measured | {"least": candidate.least, "below": candidate.below}
    numbers = {name: None if value != value else float(value) for name, value in numbers.items()}
    return {"system": candidate.system} | numbers
