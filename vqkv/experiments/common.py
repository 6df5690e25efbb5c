"""What every experiment needs: models and tokens whose fingerprints go into the provenance, rows as a DataFrame."""

import pandas as pd

from vqkv.corpus import fingerprint as corpus_fingerprint
from vqkv.corpus import load_corpus
from vqkv.models import fingerprint as model_fingerprint
from vqkv.models import load_model


def load(name: str, dtype: str, device: str, sources: dict):
    """Model and tokenizer; ``sources`` takes the hash of the weights."""
    model, tokenizer = load_model(name, dtype or None, device)
    sources[f"model {name}"] = model_fingerprint(model)
    return model, tokenizer


def draw(corpus, tokenizer, split, seq_len, num_seqs, seed, sources):
    """Tokens (num_seqs, seq_len) drawn by ``seed``; ``sources`` takes their hash."""
    tokens = load_corpus(corpus, tokenizer, split, seq_len, num_seqs, seed)
    sources[f"corpus {corpus} {split} {num_seqs}x{seq_len} seed {seed}"] = corpus_fingerprint(tokens)
    return tokens


def frame(rows: list[dict], sources: dict) -> pd.DataFrame:
    """A table whose ``attrs`` carry the sources."""
    table = pd.DataFrame(rows)
    table.attrs["sources"] = sources
    return table


def with_side_information(row: dict, about: dict, contexts: dict[str, int]) -> dict:
    """Bits per value of an ``evaluate`` row with its side information shared out among the values of so many tokens."""
    values = 2 * about["num_layers"] * about["num_kv_heads"] * about["head_dim"]
    return {name: row["bits_per_value"] + 8 * row["side_bytes"] / (n * values) for name, n in contexts.items()}
