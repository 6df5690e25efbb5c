"""The model card that ``Compressor.save_pretrained`` writes: what was fitted to which model and text, what it loses."""

from importlib.metadata import version

from huggingface_hub import ModelCard, ModelCardData

from vqkv import __version__
from vqkv.models.gguf import TITLES

PACKAGES = ("torch", "transformers")
LOSSES = {  # of an ``evaluate`` row, as a reader calls them
    "bits_per_value": "bits a value, without side information",
    "kl_mean": "KL to the uncompressed cache (nats)",
    "kl_low": "its 95% interval, from",
    "kl_high": "to",
    "ppl_exact": "perplexity, uncompressed",
    "ppl": "perplexity, compressed",
    "top1": "next tokens unchanged (share)",
}
TEXT = """# {name} for {model}

Reads and writes a compressed KV cache of `{model}` ({layers} layers). It is no model: load the model itself as well.

```python
import vqkv

model, tokenizer = vqkv.load_model("{model}")
compressor = vqkv.Compressor.from_pretrained("FOLDER OR HUB NAME")
with vqkv.compressed(model, compressor) as use:
    out = model.generate(**tokenizer("Once", return_tensors="pt"), max_new_tokens=64)
print(use.cache.report())
```

- **Calibration**: {tokens:,} tokens of {corpus}.
- **Preset**: `{name}` with {arguments}.
- **Side information**: {side_bytes:,} bytes, once for all caches.
- **Made with**: {packages}.
- **Licence**: what was learned comes from the model and the text; their licences apply.

{losses}
"""


def model_card(compressor) -> ModelCard:
    """A card for ``compressor``, with the losses in ``notes["measured"]``, a row of ``evaluate``, if it is there."""
    title, notes = compressor.model["name"], compressor.notes
    model = next((name for name, known in TITLES.items() if known == title), title)
    data = ModelCardData(library_name="vqkv", base_model=model if "/" in model else None, tags=["kv-cache"])
    text = TEXT.format(
        name=compressor.name,
        model=model,
        layers=len(compressor.codecs),
        tokens=notes.get("tokens", 0),
        corpus=notes.get("corpus", "a text that was not named"),
        arguments=", ".join(f"{key}={value!r}" for key, value in notes.get("arguments", {}).items()) or "defaults",
        side_bytes=compressor.side_bytes,
        packages=", ".join([f"vqkv {__version__}", *(f"{package} {version(package)}" for package in PACKAGES)]),
        losses=_losses(notes.get("measured")),
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}")


def _losses(row: dict | None) -> str:
    """A table of a row of ``evaluate``."""
    if not row:
        return "**Losses** were not measured: `vqkv evaluate` prints them."
    lines = [f"| {label} | {row[name]:.4g} |" for name, label in LOSSES.items() if name in row]
    return "\n".join([f"## Losses, {row.get('text', 'held-out text')}", "", "| | |", "|---|---|", *lines])
