"""``python -m vqkv.study.measured``: pages 08 and 11 in short, for ``vqkv.recommend``, as a file of the package."""

import json
from typing import Any

import pandas as pd

from vqkv.evaluation.footprint import Shape
from vqkv.evaluation.recommend import GROWS, MEASURED
from vqkv.study.tables import stored_table, write_atomically

SHAPE = Shape(30, 3, 64)  # SmolLM2-135M's, from whose bytes those that depend on the text are scaled
BARE = {"recent_window": 0}  # as page 11 measured them
AQUA = {n: {"predictor": "gptq", "first_layer_bits": first} for n, first in ((2, 2), (3, 2), (4, 4))}  # as tuned
# Page 11's label -> preset, its arguments, and what its matrices grow with.
SYSTEMS = {
    "quanto 2": ("quanto", {"bits": 2, "group_size": 32}, ""),
    "quanto 4": ("quanto", {"bits": 4}, ""),
    "kivi 2": ("kivi", {"bits": 2, "block_tokens": 64} | BARE, ""),
    "kvquant 2": ("kvquant", {"bits": 2, "outliers": 0.005, "fisher": True}, ""),
    **{f"higgs {bits}": ("higgs", {"bits": bits} | BARE, "") for bits in (2, 3, 4)},
    **{f"vqllm {k}x1024": ("vqllm", {"num_quantizers": k, "codebook_size": 1024}, "") for k in (3, 6, 8)},
    **{f"aqua higgs {n}": ("aqua", {"backbone": {"name": "higgs", "bits": n}, **AQUA[n]} | BARE, "") for n in AQUA},
    "fp8": ("fp8", {}, ""),
    "turboquant 3": ("turboquant", {"bits": 3}, ""),
    **{f"live {bits}": ("live", {"bits": bits}, "by head") for bits in (2.25, 3.25)},
    **{f"kvtc {bits}": ("kvtc", {"bits": bits} | BARE, "all layers") for bits in (0.5, 1, 2)},
}
DESIGNS = {
    f"{design} {bits}": ("best", {"bits": bits, "trellis": True}, grows)
    for design, grows in (("best-short", "by head"), ("best-mid", "predictors"), ("best-long", "by layer"))
    for bits in (0.5, 0.9, 1.8, 2.6)
}


def measured(frontier: pd.DataFrame, latency: pd.DataFrame, in_place: pd.DataFrame) -> pd.DataFrame:
    """Make ``recommend``'s table out of page 11's table and page 08's times, of a history decoded and read in place."""
    means = frontier.groupby(["system", "nominal_bits"]).mean(numeric_only=True)
    same_geometry = in_place[in_place["geometry"] == latency["geometry"].iloc[0]]
    times = _ns_per_value(latency) | _ns_per_value(same_geometry[same_geometry["context"] == latency["context"].max()])
    rows = []
    for label, (name, arguments, grows) in (SYSTEMS | DESIGNS).items():
        system, bits = label.rsplit(" ", 1) if label in DESIGNS else (label, 0)
        key = system, float(bits)  # page 11's system and nominal bits
        if key not in means.index:
            continue
        mean: Any = means.loc[key, :]
        row: dict[str, Any] = {"system": label, "preset": json.dumps([name, arguments]), "grows": grows}
        if grows:
            row["bits_per_value"] = mean["bits_per_value"]
            row["side_bytes_each"] = mean["side_bytes"] / GROWS[grows](SHAPE)
        row["ns_per_value"] = times.get(label) if name != "best" else None  # page 08 times it without a trellis
        rows.append(row | {"kl": mean["kl_mean"], "facts_lost": mean["facts_lost"]})
    return pd.DataFrame(rows)


def _ns_per_value(latency: pd.DataFrame) -> dict[str, float]:
    """Return time added to a step for each value that it reads, at page 08's longest context of one sequence."""
    longest = latency[(latency["context"] == latency["context"].max()) & (latency["batch"] == 1)].set_index("system")
    exact = longest.loc["DynamicCache"]  # whose bytes are those of all its tokens, in fp32
    share = (exact["context"] + exact["generated"] / 2) / (exact["context"] + exact["generated"])
    return (1e6 * longest["added_ms"] / (exact["stored_bytes"] / 4 * share)).to_dict()


if __name__ == "__main__":
    table = measured(*(stored_table(name) for name in ("11_frontier", "08_latency", "08_in_place")))
    write_atomically(MEASURED, table.to_csv(index=False, float_format="%.6g").encode())
