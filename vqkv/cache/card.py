"""The model card that ``Compressor.save_pretrained`` writes: what was fitted to which model and text, what it loses."""

from importlib.metadata import version
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from vqkv import __version__
from vqkv.models.gguf import TITLES

TEMPLATE = Path(__file__).with_name("card.md.j2")  # jinja2 comes with torch


def model_card(compressor) -> ModelCard:
    """Write a card for ``compressor``, with the losses in ``notes["measured"]``, a row of ``evaluate``, if it is
    there."""
    title, notes = compressor.model["name"], compressor.notes
    base = next((name for name, known in TITLES.items() if known == title), title)
    data = ModelCardData(library_name="vqkv", base_model=base if "/" in base else None, tags=["kv-cache"])
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        name=compressor.name,
        base=base,
        layers=len(compressor.codecs),
        side_bytes=compressor.side_bytes,
        notes=notes,
        arguments=", ".join(f"{key}={value!r}" for key, value in notes.get("arguments", {}).items()),
        packages=f"vqkv {__version__}, torch {version('torch')}, transformers {version('transformers')}",
        row=notes.get("measured"),
    )
