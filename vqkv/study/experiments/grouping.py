"""Notebook 03: what is quantised, and which channels share a code."""

from vqkv import presets
from vqkv.cache.compressor import Compressor
from vqkv.evaluation.evaluate import evaluate
from vqkv.study.experiments.common import calibrated, exact_compressor, frame, paired, recalled, subject
from vqkv.study.sweep import per_process, sweep

TABLE_1 = {  # the residual VQ paper's rows: how key channels are grouped, if keys are quantised, and whether values are
    "key (contiguous)": ("contiguous", False),
    "key (strided)": ("strided", False),
    "key (random)": ("random", False),
    "value": (None, True),
    "key (strided) + value": ("strided", True),
}


def grouping(
    models: list[str], corpus: str, codebook_size: int, num_quantizers: int, group_size: int, train_seqs: int,
    seq_len: int, num_seqs: int, recall_seqs: int, chunk_size: int, seeds: list[int], dtype: str, device: str,
):  # fmt: skip
    """Notebook 03: Table 1's rows (what is quantised, and how key channels are grouped) in MSE, chunked perplexity, KL
    and recall. One row per model, row of the table and seed; seeds draw the calibration text, the k-means start and the
    random permutation, while the held-out text and recall sequences stay the same.
    """
    texts = {"train": [train_seqs, seq_len], "test": [num_seqs, seq_len], "test_seed": 0}
    settings = {
        "who": texts | {"corpus": corpus, "dtype": dtype, "device": device},
        "quantizer": {"num_quantizers": num_quantizers, "codebook_size": codebook_size, "group_size": group_size},
        "recall_seqs": recall_seqs,
        "chunk_size": chunk_size,
    }
    cases = [{"model": name, "seed": seed, "label": label} for name in models for seed in seeds for label in TABLE_1]
    return frame(*sweep(_row, cases, settings, "grouping"))


def _row(model: str, seed: int, label: str, who: dict, quantizer: dict, recall_seqs: int, chunk_size: int):
    who = who | {"name": model, "seed": seed}
    found, compressor = subject(**who), _compressor(*TABLE_1[label], who, quantizer)
    row = evaluate(found.model, compressor, found.test, "chunked", chunk_size=chunk_size, exact=found.exact)
    row |= recalled(found, compressor, recall_seqs, 0, chunk_size)
    row["ppl_increase"] = 100 * (row["ppl"] / row["ppl_exact"] - 1)
    row["recall_lost"] = 100 * (row["recall_exact"] - row["recall"])
    return [{"model": model, "quantised": label, "seed": seed} | row], found.sources


def _compressor(key_grouping: str | None, values: bool, who: dict, quantizer: dict) -> Compressor:
    """Compressor of one role; the other is exact."""
    exact = exact_compressor(subject(**who))
    key = _fitted(who=who, quantizer=quantizer, key_grouping=key_grouping) if key_grouping else exact
    value = _fitted(who=who, quantizer=quantizer, key_grouping=None) if values else exact
    return paired(key, value, like=key if key_grouping else value)


@per_process(maxsize=4)
def _fitted(who: dict, quantizer: dict, key_grouping: str | None) -> Compressor:
    """Quantises keys in groups of this kind, or (None) values: a codec that two rows share is fitted once."""
    what = {"key_grouping": key_grouping, "quantize": "key"} if key_grouping else {"quantize": "value"}
    return calibrated(presets.vqllm(**what, **quantizer, seed=who["seed"]), who)
