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
TEMPLATE = """---
{{ card_data }}
---

# {{ name }} for {{ base }}

Reads and writes a compressed KV cache of `{{ base }}` ({{ layers }} layers). It is no model: load the model as well.

```python
import vqkv

model, tokenizer = vqkv.load_model("{{ base }}")
compressor = vqkv.Compressor.from_pretrained("FOLDER OR HUB NAME")
with vqkv.compressed(model, compressor) as use:
    out = model.generate(**tokenizer("Once", return_tensors="pt"), max_new_tokens=64)
print(use.cache.report())
```

- **Calibration**: {{ "{:,}".format(notes.tokens or 0) }} tokens of {{ notes.corpus or "a text that was not named" }}.
- **Preset**: `{{ name }}` with {{ arguments or "defaults" }}.
- **Side information**: {{ "{:,}".format(side_bytes) }} bytes, once for all caches.
- **Made with**: {{ packages }}.
- **Licence**: what was learned comes from the model and the text; their licences apply.

{% if row %}
## Losses, {{ row.text or "held-out text" }}

| | |
|---|---|
{% for column, label in losses.items() if column in row -%}
| {{ label }} | {{ "{:.4g}".format(row[column]) }} |
{% endfor %}
{% else %}
**Losses** were not measured: `vqkv evaluate` prints them.
{% endif %}
"""


def model_card(compressor) -> ModelCard:
    """Write a card for ``compressor``, with the losses in ``notes["measured"]``, a row of ``evaluate``, if it is
    there."""
    title, notes = compressor.model["name"], compressor.notes
    base = next((name for name, known in TITLES.items() if known == title), title)
    data = ModelCardData(library_name="vqkv", base_model=base if "/" in base else None, tags=["kv-cache"])
    about = {"name": compressor.name, "base": base, "layers": len(compressor.codecs), "notes": notes}
    packages = ", ".join([f"vqkv {__version__}", *(f"{package} {version(package)}" for package in PACKAGES)])
    arguments = ", ".join(f"{key}={value!r}" for key, value in notes.get("arguments", {}).items())
    about |= {"side_bytes": compressor.side_bytes, "packages": packages, "arguments": arguments, "losses": LOSSES}
    return ModelCard.from_template(data, template_str=TEMPLATE, row=notes.get("measured"), **about)
