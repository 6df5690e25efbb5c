"""What the technical report "Beyond 84x: A Vector Quantization Quality Framework" says."""

import math
from functools import partial

import pandas as pd
import torch

from vqkv import presets
from vqkv.experiments.audit import shapes
from vqkv.experiments.audit.rows import (
    NO,
    PARTLY,
    Tables,
    at_least,
    at_most,
    close,
    furthest,
    measured,
    model_names,
    row,
    untested,
)
from vqkv.experiments.audit.streams import TIERS, stream
from vqkv.tables import published

GPT2 = (12, 12, 64)
BLOCK = 8  # values
LIVE = "The same file beside the one cache that a server holds, the baseline of the KVQuant that it is compared with."
ALL_CODES = 1e9  # a threshold that no error exceeds
NAMES = {  # of the source's tiers in page 05
    "kf=64 lossy": "4-bit deltas",
    "keyframe + exact delta": "lossless",
    "75% retained": "4-bit deltas + H2O",
    "m=2 threshold=0.08": "product codes, threshold 0.08",
    "m=2 threshold=0.10": "product codes, threshold 0.10",
    "block 2, no fallback": "VQ of 2 values",
    "block 8, no fallback": "VQ of 8 values",
}


def rows(stated: pd.Series, tables: Tables) -> list[dict]:
    """``stated``: figures in the sources' text by key. ``tables``: this study's by name."""
    tiers = published("vqq_tinyllama").set_index("config")
    sweep = published("vqq_threshold_sweep_gpt2").set_index("threshold")
    ratios = tiers["claimed_ratio"]
    lossy, tsc = stream("4-bit deltas"), ratios["kf=64 lossy"]
    return [
        *_tiers(ratios, tables),
        row("keyframes' share of a stream", stated["vqq_keyframe_share"],
            lossy["keyframe_bytes"] / (lossy["file_bytes"] - lossy["header_bytes"]), "of the bytes",
            f"{lossy['keyframe_token_states']:,} of {lossy['token_states']:,} token-states, and 504 4-bit deltas.",
            rule=close(0.05)),
        row("exact deltas make a stream larger by", tsc / ratios["keyframe + exact delta"],
            lossy["ratio_every_fp32"] / stream("lossless")["ratio_every_fp32"], "x",
            "Deltas are 3% of a stream: exact ones cannot make it eight times as large."),
        row("evicting a quarter of the tokens, on top of 63x", ratios["75% retained"], tsc / 0.75, "x",
            "84 is 63 / 0.75, as if every keyframe were evicted; the text evicts the final snapshot (below)."),
        *_model_of_ratios(stated, tsc, ratios["block 8, no fallback"]),
        *_gains(stated),
        *_sweep(sweep, stated, tsc, tables),
        *_scales(stated, tables),
        *_stability(stated, tiers, tables),
        *_entropy(stated, ratios["block 8, no fallback"], tables),
        row("1034x over QuIP#'s 6x", stated["vqq_over_quip"], ratios["block 8, no fallback"] / stated["vqq_quip"], "x",
            "The division is right; it sets a stream of snapshots beside the weights of a model, as the source says."),
        untested("KL and top-1 of its two tables", math.nan, "scores",
                 "They need GPT-2, TinyLlama and the source's deltas: python -m vqkv.study --profile gpt2 --only 05.",
                 _scores(tiers, sweep)),
    ]  # fmt: skip


def _scores(*tables: pd.DataFrame) -> int:
    return int(sum(table.filter(regex="^(top1|kl)").notna().to_numpy().sum() for table in tables))


def _tiers(ratios: pd.Series, tables: Tables) -> list[dict]:
    """Each tier against both baselines: of bytes written here, or, where these depend on the data, of page 05's."""
    found = []
    for config, claimed in ratios.items():
        tier = NAMES[config]
        for name, against, reason in (
            ("every_fp32", "every fp32 snapshot", "Bytes of a file of 512 snapshots."),
            ("live_fp16", "the live fp16 cache", LIVE),
        ):
            claim, otherwise = f"{tier} / {against}", PARTLY if name == "every_fp32" else NO
            if tier in TIERS:
                ratio = stream(tier)[f"ratio_{name}"]
                found.append(row(claim, claimed, ratio, "x", reason, otherwise=otherwise))
            else:
                find = partial(_tier, tier=tier, against=name)
                found.append(measured(tables, "05_ladder", claim, claimed, "x", find, otherwise=otherwise))
    return found


def _tier(table: pd.DataFrame, tier: str, against: str) -> tuple[float, str]:
    ratios = table.loc[table["tier"] == tier, f"ratio_{against}"]
    return (
        ratios.mean(),
        f"{LIVE if against == 'live_fp16' else 'Bytes of a file of snapshots.'} Mean over {model_names(table)}.",
    )


def _model_of_ratios(stated: pd.Series, tsc: float, peak: float) -> list[dict]:
    """The source's formula, TSC ratio x (rest + share x gain), its values, and sizes added up instead of ratios."""
    share, vq, pq = (stated[key] for key in ("vqq_keyframe_share", "vqq_gain_vq", "vqq_gain_pq"))
    formula = {gain: tsc * (1 - share + share * gain) for gain in (vq, pq)}
    sizes, from_fp32 = (tsc / (1 - share + share / gain) for gain in (vq, 2 * vq))
    rvq2 = stream("2 residual stages")["ratio_every_fp32"]
    return [
        row("1034x: what its formula gives", peak, formula[vq], "x",
            f"63 x (0.05 + 0.95 x 16) is {formula[vq]:.0f}; 482 comes out right.", otherwise=PARTLY),
        row("482x for product codes: what its formula gives", stated["vqq_modelled_pq"], formula[pq], "x",
            "63 x (0.05 + 0.95 x 8)."),
        row("1034x: sizes added up instead of ratios", peak, sizes, "x",
            f"95% of the bytes 16 times smaller leave 0.05 + 0.95 / 16; from fp32, 32 times, it is {from_fp32:.0f}."),
        row("2 residual stages / every fp32 snapshot", stated["vqq_modelled_rvq"], rvq2, "x",
            "More than estimated: keyframes are fp32 before, so 2 bits a value are 16 times fewer, not 8.",
            rule=at_least),
    ]  # fmt: skip


def _gains(stated: pd.Series) -> list[dict]:
    vq, pq = (shapes.bits_of(preset) for preset in (presets.vq(BLOCK), presets.vqq_product(ALL_CODES)))
    return [
        row("VQ of 8 values against fp16", stated["vqq_gain_vq"], 16 / vq, "x",
            "One byte for 8 values, and the scale."),
        row("product codes against fp16", stated["vqq_gain_pq"], 16 / pq, "x",
            "Two bytes for 8 values, and one bit that says the block is not in fp16.", otherwise=PARTLY),
        row("a 4-byte scale for each block of 8 values", stated["vqq_block_scale"], 2 * BLOCK / (1 + 4), "x",
            "16 bytes become a code of one byte and a scale of four.", rule=close(0.1)),
    ]  # fmt: skip


def fallback_bits(share: float) -> float:
    """Bits a value with this share of the blocks in fp16: the others are a code of 8 bits, all have a mask bit."""
    return 16 * share + (1 - share) * 8 / BLOCK + 1 / BLOCK


def _sweep(sweep: pd.DataFrame, stated: pd.Series, tsc: float, tables: Tables) -> list[dict]:
    """The threshold sweep: what its own shares of blocks in fp16 make of its ratios."""
    share, full_gain = stated["vqq_keyframe_share"], stated["vqq_gain_vq"]
    in_fp16 = sweep["fp16_fallback_pct"] / 100
    formula = tsc * (1 - share + share * (full_gain * (1 - in_fp16) + in_fp16))
    sizes = tsc / (1 - share + share * in_fp16.map(fallback_bits) / 32)
    claimed, rough = sweep["claimed_ratio"], sweep["approximate"] == "yes"
    elbow, halved = claimed[0.07], tsc * (1 - share + share * 2)
    return [
        row("thresholds 0.05 to 0.5: what its formula gives", *furthest(_pairs(claimed, formula, rough)), "x",
            "The formula with the mean gain of all blocks against fp16; the source calls these ratios approximate.",
            rule=close(0.1), figures=int(rough.sum())),
        row("thresholds 0.05 to 0.5: sizes added up", *furthest(_pairs(claimed, sizes, rough)), "x",
            "Keyframes of fp32 values, of which codes and fallback are left; the ratio furthest off.",
            figures=int(rough.sum())),
        row("threshold 0.07: what its formula gives", elbow, formula[0.07], "x",
            f"It gives {halved:.0f} only with a gain of 2, of fp16 against fp32; all other gains are against fp16."),
        row("threshold 0.07: sizes added up", elbow, sizes[0.07], "x",
            "Right against every fp32 snapshot: 99.4% of the blocks are in fp16, half of fp32; codes add nothing.",
            rule=close(0.05)),
        row("threshold 0.07 / the live fp16 cache", elbow, 16 / fallback_bits(in_fp16[0.07]), "x",
            "99.4% of fp16's bytes are still there, and a mask bit for every block."),
        row("all blocks in fp16 / every fp32 snapshot", claimed[0.0], stream("all blocks in fp16")["ratio_every_fp32"],
            "x", "Bytes of such a file: half of fp32, as at threshold 0.07. The claimed 1 is against fp16."),
        measured(tables, "05_thresholds", "blocks in fp16 at threshold 0.07", in_fp16[0.07], "share", _fallen_back,
                 rule=close(0.1)),
    ]  # fmt: skip


def _pairs(claimed: pd.Series, found: pd.Series, chosen: pd.Series) -> list[tuple[float, float]]:
    return list(zip(claimed[chosen], found[chosen], strict=True))


def _fallen_back(table: pd.DataFrame) -> tuple[float, str]:
    rows = table[(table["method"] == "vqq") & (table["threshold"] == 0.07)]
    return 1 - rows.groupby("model")["vq_blocks"].mean().max(), f"The lower of {model_names(table)}."


def _scales(stated: pd.Series, tables: Tables) -> list[dict]:
    layers, heads, head_dim = GPT2
    x = torch.randn(1, heads, 64, head_dim, generator=torch.Generator().manual_seed(0))
    scale = presets.vq(BLOCK).key_codec(head_dim).fit(x).encode(x).fields["scale"]
    magnitudes = published("vqq_magnitudes")
    step, median = magnitudes["step_4bit_median"], magnitudes["median_max_abs"]
    return [
        row("bytes of GPT-2's scales for a keyframe", stated["vqq_scale_bytes"], 2 * layers * scale.nbytes, "bytes",
            "144 heads of fp32 are right for keys or for values; a cache has both.", otherwise=PARTLY),
        row("4-bit step: its rule, median / 16", *furthest(list(zip(step, median / 16, strict=True))), "step",
            "The rule gives the printed steps.", figures=2),
        row("4-bit step: 16 levels over [-max, max]", *furthest(list(zip(step, 2 * median / 15, strict=True))), "step",
            "The printed step is half of it: the largest error that rounding leaves.", otherwise=PARTLY, figures=2),
        row("levels a value of 256 codes for 8 values", stated["vqq_levels"], 256 ** (1 / BLOCK), "levels",
            "A step of max / 128 in each of 8 dimensions would take 256^8 codes; 256 codes are 2 levels in each."),
        measured(tables, "05_thresholds", "median error of VQ after normalisation", stated["vqq_median_error"],
                 "of the maximum", _median_error, rule=at_most, otherwise=NO),
    ]  # fmt: skip


def _median_error(table: pd.DataFrame) -> tuple[float, str]:
    rows = table[(table["method"] == "vqq") & (table["threshold"] == table["threshold"].max())]
    error = rows.groupby("model")["median_error"].mean().min()
    return error, f"The lower of {model_names(table)}; the published one is 1/128, the step of 256 levels a value."


def _stability(stated: pd.Series, tiers: pd.DataFrame, tables: Tables) -> list[dict]:
    """Ten sequences at 429x: mean, least, most, and two that are broken."""
    mean = float(tiers.loc["block 2, no fallback", "kl_mean"])
    broken, over, least, worst = (stated[f"vqq_{key}"] for key in ("broken", "broken_kl", "least_kl", "worst_kl"))
    lowest = (worst + (broken - 1) * over + (10 - broken) * least) / 10
    return [
        row("mean KL at 429x: least that its extremes allow", mean, lowest, "nats",
            "One sequence at 0.601, another above 0.5 and eight of 0.021 or more have a higher mean than 0.113."),
        measured(tables, "05_thresholds", "worst of ten sequences over the mean at 429x", worst / mean, "x",
                 _worst_sequence),
    ]  # fmt: skip


def _worst_sequence(table: pd.DataFrame) -> tuple[float, str]:
    kl = table[table["method"] == "vq, 2"].groupby("model")["kl"]
    broken = int((table.loc[table["method"] == "vq, 2", "kl"] > 0.5).sum())
    reason = f"The higher of {model_names(table)}; sequences with a KL above 0.5: {broken}."
    return (kl.max() / kl.mean()).max(), reason


def _entropy(stated: pd.Series, peak: float, tables: Tables) -> list[dict]:
    low, high = stated["vqq_entropy_low"] / peak, stated["vqq_entropy_high"] / peak
    return [
        measured(tables, "05_entropy", "entropy-coded codes, one table for all", low, "x",
                 lambda table: _coded(table, "by_stage", high), rule=at_least, otherwise=NO),
        measured(tables, "05_entropy", "entropy-coded codes, a table per head and place", low, "x",
                 lambda table: _coded(table, "by_place", high), rule=at_least, otherwise=NO),
    ]  # fmt: skip


def _coded(table: pd.DataFrame, way: str, high: float) -> tuple[float, str]:
    rows = table[table["codec"] == "VQ of 8 values"]
    gain = rows["packed"] / rows[way]
    reason = (
        f"{gain.min():.3f} to {gain.max():.3f} on {model_names(table)}, the lowest shown; guessed up to {high:.2f}."
    )
    return gain.min(), reason
