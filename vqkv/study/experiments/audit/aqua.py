"""Figures of the AQUA-KV deck, and of the tables of KVQuant's paper that it shows, found again: a function for each
kind of claim."""

import math
import re

import pandas as pd
import torch

from vqkv import presets
from vqkv.calibration.calibrate import calibrate
from vqkv.codecs.grid import gaussian_grids
from vqkv.codecs.predictive import ROLES, side_by_side
from vqkv.evaluation.footprint import Footprint
from vqkv.models.capture import capture
from vqkv.models.load import load_model
from vqkv.study.experiments.audit import shapes
from vqkv.study.tables import published

MODEL, LARGE = "Llama-3.2-3B", "Llama-3.1-70B"
WIDTHS = ["2", "3", "4"]  # bits of the rows of the large-scale table, in its order
OURS, HIGGS = "AQUA-KV (HIGGS)", presets.higgs(2)
MAKERS = {
    "HIGGS": presets.higgs,
    "AQUA-KV": lambda bits: presets.aqua(presets.higgs(bits)),
    "KIVI": presets.kivi,
    "KVQuant": presets.kvquant,
}
DETAILED = {  # rows of its detailed table
    "Quanto-2b-gs64": presets.quanto(2),
    "KVSharer (1 pair)": presets.kvsharer(1),
    "KVSharer (4 pairs)": presets.kvsharer(4),
    OURS: presets.aqua(HIGGS),
    "BF16": presets.aqua(HIGGS, first_layer_bits=16),
    "HIGGS 3 bit": presets.aqua(HIGGS, first_layer_bits=3),
    "HIGGS 2 bit": presets.aqua(HIGGS, first_layer_bits=2),
    "AQUA-KV (Quanto)": presets.aqua(presets.quanto(2)),
    "w/o V predictor": presets.aqua(HIGGS, value_from="none"),
    "w/o K predictor": presets.aqua(HIGGS, key_from="none"),
}
PREDICTORS = {
    "Linear": ("linear", {}),
    "MLP": ("mlp", {}),
    "RRR": ("reduced_rank", {"rank": 256}),
    "GPTQ": ("gptq", {}),
}
LENGTHS = {"kv_gb_32k": 2**15, "kv_gb_128k": 2**17, "kv_gb_1m": 2**20, "kv_gb_10m_16bit": 10**7}  # tokens


def _bits(preset: presets.Preset) -> float:
    """Bits of what is stored for each value, on the shape of its smallest model."""
    return shapes.stored(MODEL, preset).bits_per_value


def _detailed() -> pd.DataFrame:
    return published("aqua_detailed").drop_duplicates("config").set_index("config")


def _large(method: str, column: str) -> dict[str, float]:
    """A column of the large-scale table, by width."""
    large = published("aqua_large_scale")
    return dict(zip(WIDTHS, large.loc[large["method"] == method, column]))


def bits_by_width(method: str, widths: str, config: str = "") -> dict:
    """Bits of a method at these widths in the large-scale table, and at 2 in a row of the detailed one."""
    printed = _large(method, "bits")
    pairs = [(printed[width], _bits(MAKERS[method](int(width)))) for width in widths.split()]
    if config:
        pairs.append((_detailed()["bits"][config], pairs[0][1]))
    return {"cases": pairs}


def detailed_bits(*configs: str) -> dict:
    """Bits of rows of the detailed table."""
    return {"cases": [(_detailed()["bits"][config], _bits(DETAILED[config])) for config in configs]}


def first_layer() -> dict:
    """Its own bits, and what counting the first layer on top of all others makes of them."""
    layers = shapes.model_of(MODEL).config.num_hidden_layers
    return detailed_bits(OURS) | {"layers": layers, "added": _bits(HIGGS) + _bits(presets.higgs(4)) / layers}


def predictor_sizes(*names: str) -> dict:
    """MiB of predictors, which the detailed table has in the names of its rows."""
    printed = dict(
        match.groups() for match in map(re.compile(r"(\w+) \((\d+) MiB\)").fullmatch, _detailed().index) if match
    )
    pairs = []
    for name in names:
        kind, settings = PREDICTORS[name]
        needed = shapes.stored(MODEL, presets.aqua(HIGGS, predictor=kind, **settings))
        pairs.append((float(printed[name]), needed.side_information / 2**20))
    return {"cases": pairs}


def with_predictors(context: str) -> dict:
    """Its bits with the predictors, which one sequence has for itself."""
    needed = shapes.stored(MODEL, DETAILED[OURS])
    weights = 8 * needed.side_information / (shapes.CONTEXTS[context] * needed.values)
    return {"published": _detailed()["bits"][OURS], "recomputed": needed.bits_per_value + weights, "weights": weights}


def uncompressed() -> dict:
    """GiB of a 70B model's cache. No context is given: 128K is the one at which 16 bits make the printed 40 GiB."""
    whole = shapes.exact(LARGE).cache_bytes(shapes.CONTEXTS["128K"]) / 2**30
    return {"published": _large("Uncompressed", "cache_gib_70b")["2"], "recomputed": whole}


def large_cache(method: str) -> dict:
    """GiB of the same cache, compressed, at all widths."""
    pairs = []
    for width, size in _large(method, "cache_gib_70b").items():
        needed = shapes.stored(LARGE, MAKERS[method](int(width)))
        pairs.append((size, (needed.cache_bytes(shapes.CONTEXTS["128K"]) + needed.side_information) / 2**30))
    return {"cases": pairs}


def gaussian_grid() -> dict:
    """Variance that HIGGS's grid of 16 points for pairs of values explains."""
    return {"recomputed": 1 - gaussian_grids()[16][1]}


def one_bit() -> dict:
    """Variance that the best scalar quantizer of one bit explains."""
    return {"recomputed": 2 / math.pi}


def alone(table: pd.DataFrame) -> dict:
    """Variance that 2 bits of HIGGS explain without sources."""
    rows = table[table["strength"].isna() & (table["inputs"] == "2 bits")]
    evr = rows.groupby(["model", "target"])["evr"].mean()
    return {"cases": evr, "least": evr.min(), "most": evr.max()}


def from_layer_before(table: pd.DataFrame) -> dict:
    """Variance of keys that a linear probe explains from the layer before."""
    rows = table[(table["variant"] == "trained") & (table["target"] == "K") & (table["sources"] == "K-1")]
    return {"cases": rows.groupby("model")["evr"].mean()}


def algorithms() -> dict:
    """The share of a bundled model's keys and values that are read back as its Algorithms 2 and 3 say, layer by layer:
    what a fitted predictor says of the reconstructions before, and what is stored of the rest."""
    model, _ = load_model("vqkv/llama-mini")
    tokens = torch.randint(0, 4096, (4, 64), generator=torch.Generator().manual_seed(0))
    compressor = calibrate(model, tokens, presets.aqua(HIGGS, sink_tokens=0, recent_window=0), progress=False)
    exact, known, rows = dict(zip(ROLES, capture(model, tokens))), compressor.new_pass(), []
    before: dict[tuple[str, int], torch.Tensor] = {}
    for layer, codecs in enumerate(compressor.codecs):
        pair = [exact[role][layer].float() for role in ROLES]
        read = compressor.reconstruct(layer, *pair, known)
        for role, x, codec, found in zip(ROLES, pair, codecs, read, strict=True):
            sources = [("key", layer - 1)] if role == "key" else [("value", layer - 1), ("key", layer)]
            predicted = 0.0
            if layer:
                beside = torch.cat([side_by_side(before[place]) for place in sources], dim=-1)
                predictor = compressor.predictions[role, layer].predictor
                predicted = predictor(beside).unflatten(-1, (x.shape[1], -1)).transpose(1, 2)
            before[role, layer] = codec.decode(codec.encode(x - predicted)) + predicted
            rows.append(((before[role, layer] - found).abs() < 1e-5).double().mean().item())
    return {"cases": rows}


def error_share(table: pd.DataFrame) -> dict:
    """The share of a quantizer's error that is left with predictors over the share of the variance that these leave,
    by model and role, mean over layers and bits."""
    share = table["mse"] / table["mse_alone"] / (1 - table["evr"])
    return {"cases": share.groupby([table["model"], table["role"]]).mean()}


def llama_weights() -> dict:
    """GiB of LLaMA's weights in KVQuant's table."""
    return {"cases": [(size["weights_gb_16bit"], exact.weights / 2**30) for size, exact in _llamas()]}


def llama_weights_2bit() -> dict:
    """GiB of LLaMA's weights, each in 2 bits."""
    return {"cases": [(size["weights_gb_2bit"], exact.weights / 8 / 2**30) for size, exact in _llamas()]}


def llama_caches() -> dict:
    """GiB of its caches in 16 bits, at every length."""
    cases = [
        (size[column], exact.cache_bytes(tokens, size["batch"]) / 2**30)
        for size, exact in _llamas()
        for column, tokens in LENGTHS.items()
    ]
    return {"cases": cases}


def llama_packed() -> dict:
    """GiB of its caches of 10M tokens in 2 bits."""
    pairs = []
    for size, _ in _llamas():
        codes = shapes.stored(f"LLaMA-{size['model']}", presets.kvquant(2, block=8))
        pairs.append((size["kv_gb_10m_2bit"], codes.cache_bytes(10**7, size["batch"]) / 2**30))
    return {"cases": pairs, "bits": codes.bits_per_value}


def _llamas() -> list[tuple[dict, Footprint]]:
    """Rows of the table, and what is counted of a model in 16 bits."""
    sizes = published("kv_size_by_context").to_dict("records")
    return [(size, shapes.exact(f"LLaMA-{size['model']}")) for size in sizes]
