"""What the AQUA-KV deck says, and the tables of KVQuant's paper that it shows."""

import math
import re
from functools import partial

import pandas as pd

from vqkv import presets
from vqkv.codec.grid import gaussian_grids
from vqkv.experiments.audit import shapes
from vqkv.experiments.audit.rows import (
    PARTLY,
    ROUNDED,
    Tables,
    above,
    close,
    furthest,
    measured,
    model_names,
    row,
    untested,
)
from vqkv.tables import published

MODEL, LARGE = "Llama-3.2-3B", "Llama-3.1-70B"
WIDTHS = (2, 3, 4)  # bits of the rows of the large-scale table, in its order
PREDICTORS = {
    "Linear": ("linear", {}),
    "MLP": ("mlp", {}),
    "RRR": ("reduced_rank", {"rank": 256}),
    "GPTQ": ("gptq", {}),
}


def rows(stated: pd.Series, tables: Tables) -> list[dict]:
    """``stated``: figures in the sources' text by key. ``tables``: this study's by name."""
    detailed = published("aqua_detailed").drop_duplicates("config").set_index("config")
    large = published("aqua_large_scale")
    return [
        *_quantizers(detailed["bits"], large),
        *_first_layer(detailed["bits"], large),
        *_predictors(detailed["bits"]),
        *_large_caches(large),
        *_explained(tables),
        *_losses(detailed["wiki2_ppl"], tables),
        *_sizes_by_context(published("kv_size_by_context")),
        *_untested(stated, detailed, large),
    ]


def _bits(preset: presets.Preset) -> float:
    return shapes.stored(MODEL, preset).bits_per_value


def _quantizers(detailed: pd.Series, large: pd.DataFrame) -> list[dict]:
    """Bits of what is stored for each value, on the shape of its smallest model."""
    kivi = _by_width(large, "KIVI", presets.kivi)
    others = [*kivi[::2], (detailed["KIVI-2b-gs128-r128"], kivi[0][1])]
    higgs = _by_width(large, "HIGGS", presets.higgs)
    kvquant = _by_width(large, "KVQuant", presets.kvquant)
    sharer = [
        (detailed["KVSharer (1 pair)"], _bits(presets.kvsharer(1))),
        (detailed["KVSharer (4 pairs)"], _bits(presets.kvsharer(4))),
    ]
    quanto = (detailed["Quanto-2b-gs64"], _bits(presets.quanto(2)))
    typo = "2 and 4 bits are printed with the 0.25 of a 16-bit scale and offset per 128 values; 3 bits need them, too."
    return [
        row("HIGGS, 2 to 4 bits", *furthest([*higgs, (detailed["HIGGS-2b-gs1024"], higgs[0][1])]), "bits",
            "Codes, and one 16-bit norm for 1,024 values.", figures=4),
        row("KIVI, 2 and 4 bits", *furthest(others), "bits", "Codes, and a 16-bit scale and offset for 128 values.",
            figures=3),
        row("KIVI, 3 bits", *kivi[1], "bits", typo),
        row("KVQuant, 2 to 4 bits", *furthest([*kvquant, (detailed["KVQuant-2b-s1%"], kvquant[0][1])]), "bits",
            "Codes, 1% of the values with their places, a 16-bit scale and offset for a token's values.", figures=4),
        row("Quanto, 2 bits", *quanto, "bits", "Codes, and a 16-bit scale and offset for 64 values."),
        row("KVSharer, 1 and 4 pairs", *furthest(sharer), "bits", "27 and 24 of 28 layers are stored.", figures=2),
    ]  # fmt: skip


def _by_width(large: pd.DataFrame, method: str, make) -> list[tuple[float, float]]:
    """(published, recomputed) bits for 2, 3 and 4 bits."""
    printed = large.loc[large["method"] == method, "bits"]
    return [(bits, _bits(make(width))) for width, bits in zip(WIDTHS, printed, strict=True)]


def _first_layer(detailed: pd.Series, large: pd.DataFrame) -> list[dict]:
    """Bits of AQUA-KV itself, in both tables."""
    found = {bits: _bits(presets.aqua(presets.higgs(2), first_layer_bits=bits)) for bits in (16, 4, 3, 2)}
    others = [(detailed["BF16"], found[16]), (detailed["HIGGS 3 bit"], found[3]), (detailed["HIGGS 2 bit"], found[2])]
    others.append((detailed["AQUA-KV (Quanto)"], _bits(presets.aqua(presets.quanto(2)))))
    without = [
        (detailed["w/o V predictor"], _bits(presets.aqua(presets.higgs(2), value_from="none"))),
        (detailed["w/o K predictor"], _bits(presets.aqua(presets.higgs(2), key_from="none"))),
    ]
    layers = shapes.model_of(MODEL).config.num_hidden_layers
    added = _bits(presets.higgs(2)) + _bits(presets.higgs(4)) / layers
    reason = (
        f"The 4-bit first layer is one of {layers}; counted on top of {layers} others it makes the printed {added:.2f}."
    )
    whole = _by_width(large, "AQUA-KV", lambda bits: presets.aqua(presets.higgs(bits)))
    return [
        row("AQUA-KV, HIGGS 2 to 4 bits, large-scale table", *furthest(whole), "bits",
            "HIGGS's bits, with 4 in the first layer; of the 3B model, and printed for all.", figures=3),
        row("AQUA-KV, HIGGS 2 bits, detailed table", detailed["AQUA-KV (HIGGS)"], found[4], "bits", reason,
            otherwise=PARTLY),
        row("AQUA-KV, other first layers, and with Quanto", *furthest(others), "bits",
            "As above: with the first layer on top of 28 others they come within 0.01 of what is printed.",
            otherwise=PARTLY, figures=4),
        row("AQUA-KV without one predictor", *furthest(without), "bits",
            "Right, and the same with both: a predictor changes what the codes say, not how many there are.",
            figures=2),
    ]  # fmt: skip


def _predictors(detailed: pd.Series) -> list[dict]:
    sizes = {}
    for config in detailed.index:
        if match := re.fullmatch(r"(\w+) \((\d+) MiB\)", config):
            kind, settings = PREDICTORS[match[1]]
            needed = shapes.stored(MODEL, presets.aqua(presets.higgs(2), predictor=kind, **settings))
            sizes[match[1]] = (float(match[2]), needed.side_information / 2**20)
    found = [
        row("linear predictors of a 3B model", *sizes["Linear"], "MiB",
            "27 layers: keys from 1,024 channels, values from 2,048, in 16 bits."),
        row("MLP, reduced-rank and GPTQ predictors", *furthest([sizes[name] for name in ("MLP", "RRR", "GPTQ")]), "MiB",
            "Within what group scales and layer norms take.", rule=close(0.06), figures=3),
    ]  # fmt: skip
    needed = shapes.stored(MODEL, presets.aqua(presets.higgs(2)))
    for name in ("8K", "128K"):
        weights = 8 * needed.side_information / (shapes.CONTEXTS[name] * needed.values)
        reason = f"True of the codes; the predictors add {weights:.2g} bits a value, fewer with several sequences."
        found.append(
            row(f"... predictors counted, one sequence of {name}", detailed["AQUA-KV (HIGGS)"],
                needed.bits_per_value + weights, "bits", reason, otherwise=PARTLY)
        )  # fmt: skip
    return found


def _large_caches(large: pd.DataFrame) -> list[dict]:
    """GiB of a 70B model's cache. No context is given: 128K is the one at which 16 bits make the printed 40 GiB."""
    makers = {
        "HIGGS": presets.higgs,
        "AQUA-KV": lambda bits: presets.aqua(presets.higgs(bits)),
        "KIVI": presets.kivi,
        "KVQuant": presets.kvquant,
    }
    tokens, printed = shapes.CONTEXTS["128K"], large.groupby("method")["cache_gib_70b"].apply(list)
    whole = shapes.exact(LARGE).cache_bytes(tokens) / 2**30
    found = [row("70B cache, uncompressed", printed["Uncompressed"][0], whole, "GiB", "That is 128K tokens.")]
    for method, make in makers.items():
        pairs = []
        for bits, size in zip(WIDTHS, printed[method], strict=True):
            needed = shapes.stored(LARGE, make(bits))
            pairs.append((size, (needed.cache_bytes(tokens) + needed.side_information) / 2**30))
        agree = sum(ROUNDED(*pair) for pair in pairs)
        reason = f"Codes, exact tokens, side information at 128K; {agree} of 3 agree within 2%, the furthest is shown."
        found.append(
            row(f"70B cache, {method}, 2 to 4 bits", *furthest(pairs), "GiB", reason, otherwise=PARTLY, figures=3)
        )
    return found


def _explained(tables: Tables) -> list[dict]:
    quantizers = published("aqua_quantizer_evr").set_index("bits")["explained_variance"]
    grid = 1 - gaussian_grids()[16][1]
    return [
        row("a 2-bit quantizer explains, Gaussian", quantizers[2], grid, "of the variance",
            "HIGGS's grid of 16 points for pairs of values."),
        row("a 1-bit quantizer explains, Gaussian", quantizers[1], 2 / math.pi, "of the variance",
            "0.75 = 1 - 2^-2 is Shannon's bound; one bit a value, the best scalar quantizer, explains 2/pi.",
            otherwise=PARTLY),
        measured(tables, "04_algebra", "a 2-bit quantizer explains, keys and values here", quantizers[2],
                 "of the variance", _alone, rule=close(0.05)),
        measured(tables, "04_evr", "the layer before explains keys like 2 bits do", quantizers[2],
                 "of the variance", _from_layer_before, rule=close(0.05)),
    ]  # fmt: skip


def _alone(table: pd.DataFrame) -> tuple[float, str]:
    rows = table[table["strength"].isna() & (table["inputs"] == "2 bits")]
    evr = rows.groupby(["model", "target"])["evr"].mean()
    reason = f"HIGGS without sources on {model_names(table)}: {evr.min():.2f} to {evr.max():.2f}; the lowest is shown."
    return evr.min(), reason


def _from_layer_before(table: pd.DataFrame) -> tuple[float, str]:
    rows = table[(table["variant"] == "trained") & (table["target"] == "K") & (table["sources"] == "K-1")]
    evr = rows.groupby("model")["evr"].mean()
    reason = f"A linear probe on {model_names(table)}, the lowest; page 04 says how much of it is language."
    return evr.min(), reason


def _losses(ppl: pd.Series, tables: Tables) -> list[dict]:
    """Directions of its tables: what is lost as an increase of perplexity there, as KL here."""
    increase = ppl - ppl["uncompressed"]
    compared = [
        ("2-bit HIGGS loses more than with predictors", "HIGGS-2b-gs1024", "AQUA-KV (HIGGS)", "higgs 2", "aqua higgs 2",
         False),
        ("no key predictor loses more than no value predictor", "w/o K predictor", "w/o V predictor",
         "aqua higgs 2, V only", "aqua higgs 2, K only", False),
        ("GPTQ's predictors lose as much as linear ones", "GPTQ (41 MiB)",
         "AQUA-KV (HIGGS)", "aqua higgs 2, GPTQ 4 bits", "aqua higgs 2", True),
    ]  # fmt: skip
    return [
        measured(
            tables,
            "07_ablation",
            claim,
            increase[worse] / increase[better],
            "loss over loss",
            partial(_kl_ratio, worse=ours[0], better=ours[1], equal=equal),
            rule=close(0.25) if equal else above(1),
        )
        for claim, worse, better, *ours, equal in compared
    ]


def _kl_ratio(table: pd.DataFrame, worse: str, better: str, equal: bool) -> tuple[float, str]:
    """On the model that bears the claim out least: the ratio furthest from 1 where they should be equal, else the
    lowest."""
    kl = table.drop_duplicates(["model", "label"]).pivot(index="model", columns="label", values="kl_mean")
    if not {worse, better} <= set(kl.columns):
        return math.nan, ""
    ratios = list(kl[worse] / kl[better])
    ratio = furthest([(1, found) for found in ratios])[1] if equal else min(ratios)
    return ratio, f"Here KL on {model_names(table)}, the lesser evidence of them; published: increases of perplexity."


def _sizes_by_context(printed: pd.DataFrame) -> list[dict]:
    """KVQuant's table of LLaMA's weights and caches, whose GB are GiB."""
    columns = {"kv_gb_32k": 2**15, "kv_gb_128k": 2**17, "kv_gb_1m": 2**20, "kv_gb_10m_16bit": 10**7}
    weights, caches, packed = [], [], []
    for size in printed.to_dict("records"):
        name = f"LLaMA-{size['model']}"
        needed, codes = shapes.exact(name), shapes.stored(name, presets.kvquant(2, block=8))
        weights += [(size["weights_gb_16bit"], needed.weights / 2**30)]
        caches += [(size[key], needed.cache_bytes(tokens, size["batch"]) / 2**30) for key, tokens in columns.items()]
        packed += [(size["kv_gb_10m_2bit"], codes.cache_bytes(10**7, size["batch"]) / 2**30)]
    bits = codes.bits_per_value
    return [
        row("LLaMA weights in 16 bits", *furthest(weights), "GiB", "Printed as GB, which are GiB here.", figures=8),
        row("LLaMA caches of 32K to 10M tokens", *furthest(caches), "GiB",
            "In GiB; 10M is ten million, the others are powers of two.", figures=len(caches)),
        row("LLaMA caches of 10M tokens in 2 bits", *furthest(packed), "GiB",
            f"Exactly an eighth of 16 bits: codes alone, where KVQuant stores {bits:.2f} bits a value.",
            otherwise=PARTLY, figures=8),
    ]  # fmt: skip


def _untested(stated: pd.Series, detailed: pd.DataFrame, large: pd.DataFrame) -> list[dict]:
    scores = detailed[["wiki2_ppl", "longbench_avg"]].notna().to_numpy().sum()
    scores += large.filter(regex="ppl|longbench").notna().to_numpy().sum()
    needs = "They need models of 3B to 70B: python -m vqkv.study --profile llama3.2-3b --only 07,10."
    return [
        untested("perplexity and LongBench of its two tables", math.nan, "scores", needs, int(scores)),
        untested("AQUA-KV's tokens per second over HIGGS's, 70B", stated["aqua_speed"] / stated["aqua_speed_plain"],
                 "x", "That was timed on the source's own cards.", 2),
    ]  # fmt: skip
