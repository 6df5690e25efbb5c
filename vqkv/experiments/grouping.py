"""Notebook 03: what is quantised, and which channels share a code."""

from tqdm import tqdm

from vqkv import presets
from vqkv.calibrate import calibrate
from vqkv.compressor import Compressor
from vqkv.evaluate import evaluate
from vqkv.experiments.common import draw, frame, load
from vqkv.recall import RecallTask


def grouping(
    models: list[str], corpus: str, codebook_size: int, num_quantizers: int, group_size: int, train_seqs: int,
    seq_len: int, num_seqs: int, recall_seqs: int, chunk_size: int, seeds: list[int], dtype: str, device: str,
):  # fmt: skip
    """Notebook 03: Table 1's rows (what is quantised, and how key channels are grouped) in MSE, chunked perplexity, KL
    and recall. One row per model, row of the table and seed; seeds draw the calibration text, the k-means start and the
    random permutation, while the held-out text and recall sequences stay the same.
    """
    rows, sources = [], {}
    for name in models:
        model, tokenizer = load(name, dtype, device, sources)
        test = draw(corpus, tokenizer, "test", seq_len, num_seqs, 0, sources)
        recall = RecallTask(tokenizer).batch(seq_len, recall_seqs, 0)
        for seed in seeds:
            train = draw(corpus, tokenizer, "train", seq_len, train_seqs, seed, sources)
            settings = {"num_quantizers": num_quantizers, "codebook_size": codebook_size, "group_size": group_size}
            for label, compressor in _table_1(model, train, settings | {"seed": seed}).items():
                row = evaluate(model, compressor, test, "chunked", chunk_size=chunk_size)
                answers = {"answers": recall.answers, "chunk_size": chunk_size, "reconstruction": False}
                hits = evaluate(model, compressor, recall.tokens, "chunked", **answers)
                row |= {"recall": hits["recall"], "recall_exact": hits["recall_exact"]}
                row["ppl_increase"] = 100 * (row["ppl"] / row["ppl_exact"] - 1)
                row["recall_lost"] = 100 * (row["recall_exact"] - row["recall"])
                rows.append({"model": name, "quantised": label, "seed": seed} | row)
    return frame(rows, sources)


def _table_1(model, train, settings: dict) -> dict[str, Compressor]:
    """The rows of the residual VQ paper's Table 1; a codec that two rows share is fitted once."""
    exact = calibrate(model, train[:1], presets.fp16(), progress=False)
    fitted = {
        kind: calibrate(model, train, presets.vqllm(key_grouping=kind, quantize="key", **settings), progress=False)
        for kind in tqdm(("contiguous", "strided", "random"), desc="key codebooks", leave=False, disable=None)
    }
    value = calibrate(model, train, presets.vqllm(quantize="value", **settings), progress=False)
    keys = {f"key ({kind})": _join(compressor, exact) for kind, compressor in fitted.items()}
    return keys | {"value": _join(exact, value, like=value), "key (strided) + value": _join(fitted["strided"], value)}


def _join(keys: Compressor, values: Compressor, like: Compressor | None = None) -> Compressor:
    """The key codecs of one compressor with the value codecs of another."""
    like = like or keys
    pairs = [(key, value) for (key, _), (_, value) in zip(keys.codecs, values.codecs, strict=True)]
    return Compressor(like.name, pairs, like.settings, like.model)
