"""Figures of the technical report "Beyond 84x: A Vector Quantization Quality Framework", found again: a function for
each kind of claim."""

from functools import cache

import pandas as pd
import torch

from vqkv import presets
from vqkv.study.experiments.audit import shapes
from vqkv.study.experiments.audit.rows import stated
from vqkv.study.experiments.ladder import written
from vqkv.study.experiments.product_codes import gaps
from vqkv.study.experiments.sequences import modes
from vqkv.study.tables import published

GPT2 = (12, 12, 64)
BLOCK = 8  # values
LONGEST = 4096  # steps of a stream
ALL_CODES = 1e9  # a threshold that no error exceeds
CODECS = {"VQ of 8 values": presets.vq(BLOCK), "product codes": presets.vqq_product(ALL_CODES)}
STEPS, INTERVAL = 512, 64  # of streams that are written here: a token each, and from keyframe to keyframe
LAYERS, HEADS, HEAD_DIM = 2, 4, 64  # on which ratios hardly depend
TIERS = {  # what keyframes and deltas are stored as; a preset where it takes the same bytes for all data
    "4-bit deltas": ("fp32", "int4"),
    "lossless": ("fp32", "exact"),
    "VQ of 2 values": (presets.vq(2), "int4"),
    "VQ of 8 values": (presets.vq(8), "int4"),
    "2 residual stages": (presets.rvq2(), "int4"),
    "all blocks in fp16": (presets.vqq(0.0), "int4"),
}


def _claimed(config: str) -> float:
    """The ratio of one of its tiers."""
    return published("vqq_tinyllama").set_index("config")["claimed_ratio"][config]


@cache
def stream(tier: str) -> dict:
    """``SnapshotReader.report()`` of a file of random values."""
    x = torch.randn(2, LAYERS, 1, HEADS, STEPS, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    keyframes, deltas = TIERS[tier]
    if not isinstance(keyframes, str):
        codec = keyframes.key_codec(HEAD_DIM).fit(x[0, 0])
        keyframes = [(codec, codec)] * LAYERS
    with written(list(map(list, x)), keyframes, deltas, INTERVAL) as found:
        return found.report()


def stream_ratio(tier: str, against: str) -> dict:
    """Of bytes written here, in a stream of ``STEPS`` steps to one of ``LONGEST``: the source does not say how long
    its streams are, nor what its deltas are to."""
    return _ranges([stream(tier)], against)


def ladder_ratio(table: pd.DataFrame, tier: str, against: str) -> dict:
    """Of page 05's files, where bytes depend on the data."""
    return _ranges(table[table["tier"] == tier].to_dict("records"), against)


def _ranges(reports: list[dict], against: str) -> dict:
    """The live cache has a length, that which was written; all snapshots grow with it."""
    written = [report[f"ratio_{against}"] for report in reports]
    if against != "every_fp32":
        return {"cases": written}
    longer = [_ratio_at(report, LONGEST) for report in reports]
    facts = {"steps": STEPS, "longest": LONGEST, "least": min(written), "most": max(longer)}
    return {"ranges": list(zip(written, longer, strict=True))} | facts


def _ratio_at(report: dict, steps: int) -> float:
    """The ratio to all snapshots of a longer stream, whose keyframes and deltas take as much a token."""
    states, tails = (_states(number) for number in (STEPS, steps))
    stored = report["keyframe_bytes"] / states[0] * tails[0] + report["delta_bytes"] / states[1] * tails[1]
    return report["every_fp32_bytes"] / states[2] * tails[2] / stored


def _states(steps: int) -> tuple[int, int, int]:
    """Tokens in all keyframes, in all deltas, in all snapshots."""
    keyframes = steps // INTERVAL
    return INTERVAL * keyframes * (keyframes + 1) // 2, steps - keyframes, steps * (steps + 1) // 2


def keyframe_share() -> dict:
    """Of the bytes of a stream with 4-bit deltas."""
    lossy = stream("4-bit deltas")
    share = lossy["keyframe_bytes"] / (lossy["file_bytes"] - lossy["header_bytes"])
    return {"recomputed": share, "states": lossy["keyframe_token_states"], "of": lossy["token_states"]}


def exact_deltas() -> dict:
    """The factor by which they make a stream larger."""
    found = [stream(tier)["ratio_every_fp32"] for tier in ("4-bit deltas", "lossless")]
    return {
        "published": _claimed("kf=64 lossy") / _claimed("keyframe + exact delta"),
        "recomputed": found[0] / found[1],
    }


def evicted_quarter() -> dict:
    """The tier's ratio, if every keyframe were evicted."""
    return {"recomputed": _claimed("kf=64 lossy") / 0.75}


def by_formula(key: str) -> dict:
    """The source's formula, TSC ratio x (rest + share x gain)."""
    share = stated("vqq_keyframe_share")
    return {"recomputed": _claimed("kf=64 lossy") * (1 - share + share * stated(key))}


def by_sizes() -> dict:
    """The same with sizes added up instead of ratios, and from fp32."""
    share, gain = stated("vqq_keyframe_share"), stated("vqq_gain_vq")
    sizes = [_claimed("kf=64 lossy") / (1 - share + share / each) for each in (gain, 2 * gain)]
    return {"recomputed": sizes[0], "from_fp32": sizes[1]}


def gain(codec: str, mask_bits: str = "0") -> dict:
    """Against fp16, of keys that are encoded here, without the bits of a block that say how it is stored."""
    return {"recomputed": 16 / (shapes.bits_of(CODECS[codec]) - int(mask_bits) / BLOCK)}


def block_scale() -> dict:
    """16 bytes over a code of one byte and a scale of four."""
    return {"recomputed": 2 * BLOCK / (1 + 4)}


def fallback_bits(share: float) -> float:
    """Bits a value with this share of the blocks in fp16: the others are a code of 8 bits, all have a mask bit."""
    return 16 * share + (1 - share) * 8 / BLOCK + 1 / BLOCK


def threshold_sweep(how: str, threshold: str = "") -> dict:
    """Ratios of its threshold sweep from its own shares of blocks in fp16, by its formula with the mean gain of all
    blocks or by sizes added up: at one threshold, or at those that it calls approximate."""
    sweep = published("vqq_threshold_sweep_gpt2").set_index("threshold")
    share, tsc, in_fp16 = stated("vqq_keyframe_share"), _claimed("kf=64 lossy"), sweep["fp16_fallback_pct"] / 100
    if how == "formula":
        found = tsc * (1 - share + share * (stated("vqq_gain_vq") * (1 - in_fp16) + in_fp16))
    else:
        found = tsc / (1 - share + share * in_fp16.map(fallback_bits) / 32)
    chosen = sweep.index == float(threshold) if threshold else sweep["approximate"] == "yes"
    pairs = list(zip(sweep["claimed_ratio"][chosen], found[chosen], strict=True))
    return {"cases": pairs, "halved": tsc * (1 - share + share * 2)}


def block_algorithm(threshold: str) -> dict:
    """The share of random blocks that are stored as its Algorithm 1 says: in fp16 where the code's largest error, over
    the head's maximum, is above the threshold, else as the code."""
    x = torch.randn(1, 4, 256, 64, generator=torch.Generator().manual_seed(0))
    plain, mixed = (presets.vqq(limit).key_codec(64).fit(x).quantize_dequantize(x) for limit in (1e9, float(threshold)))
    blocks = (y.unflatten(2, (-1, 64)).flatten(3) for y in (x, plain, mixed))
    x, plain, mixed = (y.unflatten(3, (-1, BLOCK)) for y in blocks)
    largest = x.abs().amax((3, 4), keepdim=True)
    exact = ((x - plain) / largest).abs().amax(4) > float(threshold)
    stored = torch.where(exact[..., None], x, plain)
    return {"recomputed": ((mixed - stored).abs().amax(4) < 2**-10 * largest[..., 0]).double().mean().item()}


def live_at_threshold(threshold: str) -> dict:
    """fp16's bits over what is stored, of the blocks in fp16 that its sweep has at a threshold."""
    share = published("vqq_threshold_sweep_gpt2").set_index("threshold")["fp16_fallback_pct"][float(threshold)] / 100
    return {"recomputed": 16 / fallback_bits(share)}


def fallen_back(table: pd.DataFrame) -> dict:
    """The share of blocks in fp16 at threshold 0.07."""
    rows = table[(table["method"] == "vqq") & (table["threshold"] == 0.07)]
    return {"cases": 1 - rows.groupby("model")["vq_blocks"].mean()}


def scale_bytes() -> dict:
    """Of GPT-2's keys and values in a keyframe."""
    layers, heads, head_dim = GPT2
    x = torch.randn(1, heads, 64, head_dim, generator=torch.Generator().manual_seed(0))
    return {"recomputed": 2 * layers * presets.vq(BLOCK).key_codec(head_dim).fit(x).encode(x).fields["scale"].nbytes}


def four_bit_step(over: str) -> dict:
    """The median of the largest magnitudes over 16, its rule, or over half of 15 steps."""
    magnitudes = published("vqq_magnitudes")
    steps = magnitudes["median_max_abs"] / 16 if over == "16" else 2 * magnitudes["median_max_abs"] / 15
    return {"cases": list(zip(magnitudes["step_4bit_median"], steps, strict=True))}


def levels() -> dict:
    """A value's share of 256 codes."""
    return {"recomputed": 256 ** (1 / BLOCK)}


def median_error(table: pd.DataFrame) -> dict:
    """Of the maximum."""
    rows = table[(table["method"] == "vqq") & (table["threshold"] == table["threshold"].max())]
    return {"cases": rows.groupby("model")["median_error"].mean()}


def least_mean() -> dict:
    """The least mean of ten sequences at 429x that its extremes allow."""
    broken, over, least, worst = (stated(f"vqq_{key}") for key in ("broken", "broken_kl", "least_kl", "worst_kl"))
    return {"recomputed": (worst + (broken - 1) * over + (10 - broken) * least) / 10}


def worst_sequence(table: pd.DataFrame) -> dict:
    """The worst of the sequences over their mean."""
    rows = table[table["method"] == "vq, 2"]
    kl = rows.groupby("model")["kl"]
    return {"cases": kl.max() / kl.mean(), "broken": int((rows["kl"] > 0.5).sum())}


def entropy_coded(table: pd.DataFrame, way: str) -> dict:
    """The gain of entropy coding on codes of 8 values, by model, keys and values."""
    rows = table[table["codec"] == "VQ of 8 values"]
    gains, plain = rows["packed"] / rows[way], _claimed("block 8, no fallback")
    least, guessed = (stated(key) / plain for key in ("vqq_entropy_low", "vqq_entropy_high"))
    cases = list(zip(gains.clip(least, guessed), gains, strict=True))
    return {"cases": cases, "least": gains.min(), "most": gains.max(), "guessed": guessed}


def over_quip() -> dict:
    """Its ratios over QuIP#'s."""
    said = published("stated_figures").set_index("key")["value"].filter(like="vqq_over_quip_")
    return {"cases": [(value, float(key.split("_")[-1]) / stated("vqq_quip")) for key, value in said.items()]}


def operating_points() -> dict:
    """Rows of its threshold sweep."""
    return {"recomputed": len(published("vqq_threshold_sweep_gpt2"))}


def broken_share(table: pd.DataFrame, codec: str) -> dict:
    """The share of sequences above the KL that the source calls broken."""
    mine = table[table["codec"] == codec]
    return {"cases": modes(mine)["broken"], "worst": mine["kl"].max()}


def second_best(table: pd.DataFrame, codec: str) -> dict:
    """Where the most likely token is another, the share in which the exact one is second."""
    return {"cases": modes(table[table["codec"] == codec])["second"]}


def bimodality(table: pd.DataFrame, codec: str) -> dict:
    """Sarle's coefficient of log KL."""
    return {"cases": modes(table[table["codec"] == codec])["sarle"]}


def evicted_most(table: pd.DataFrame) -> dict:
    """The largest ratio of heavy hitters in 16 bits whose KL stays below 0.1."""
    rows = table[(table["codec"] == "fp16") & (table["rule"] == "heavy hitters") & (table["kl_mean"] < 0.1)]
    return {"cases": rows.groupby("model")["ratio"].max(), "claimed": stated("vqq_h2o_most")}


def product_over_residual(table: pd.DataFrame) -> dict:
    """Squared error at the largest codebooks, by data."""
    found = gaps(table)
    return {"cases": found.loc[found["codebook_size"] == found["codebook_size"].max(), "mean"]}


def normed(table: pd.DataFrame) -> dict:
    """KL of codes of 8 values on one model whose keys, or keys and values, are normed; ``plain``: where none are."""
    kl = table[table["system"] == "vq"].set_index("size")["kl_mean"]
    return {"cases": kl[1], "least": kl[1].min(), "most": kl[1].max(), "plain": kl[0]}


def in_other_units(table: pd.DataFrame, size: str) -> dict:
    """KL of codes of 8 values where no magnitude is above ``size``; ``plain``: of the model as it is."""
    kl = table[table["system"] == "vq"].set_index(["phenomenon", "size"])["kl_mean"]
    return {"recomputed": kl["largest magnitude", float(size)], "plain": kl["loud heads", 1.0]}


def ppl_moved(table: pd.DataFrame, tier: str) -> dict:
    """Perplexity of a tier less the exact cache's, in size."""
    rows = table[table["tier"] == tier].set_index("model")
    return {"cases": (rows["ppl"] - rows["ppl_exact"]).abs()}


def kvquant_ratio() -> dict:
    """To fp16 of keys in 4 bits, beside the nearest ratio of the range that the source names."""
    bits = shapes.bits_of(presets.kvquant(4))
    said = min(max(16 / bits, stated("vqq_kvquant_least")), stated("vqq_kvquant_most"))
    return {"published": said, "recomputed": 16 / bits, "bits": bits}
