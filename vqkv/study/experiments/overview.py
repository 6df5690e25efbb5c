"""Page 00: what the other pages found, in one table."""

import pandas as pd

from vqkv.study.experiments.common import frame
from vqkv.study.experiments.designs import BEST
from vqkv.study.experiments.rule import by_rule, cache_shape, share_of_bits
from vqkv.study.tables import stored, stored_table

READ = ("08_latency", "11_frontier", "12_claims")
CONTEXTS = {"8,192": "8k", "131,072": "128k"}
MIN_BITS, MAX_BITS = 0.9, 3.0  # bits of KVTC within which the complete curve is compared


def contents() -> dict[str, str]:
    """Return the tables that are read by name, with a hash of what each holds: other contents, other findings."""
    return {name: pair[1] for name in READ if (pair := stored(name))}


def findings(tables: dict[str, str]) -> pd.DataFrame:
    """List the study's findings from ``tables`` (of ``contents``), with ``least`` and ``most`` of each one's cases."""
    latency, frontier, claims = map(stored_table, READ)
    seen, model, ranges = frontier_rows(), frontier["model"].iloc[0], []
    for tokens, name in CONTEXTS.items():
        share = share_of_bits(seen, name, MIN_BITS, MAX_BITS)
        ends = pd.Series([share["lowest"], share["highest"]])
        ranges.append((f"best over KVTC at equal KL, {tokens} tokens", model, ends, "of its bits", "11"))
    system, two_bits = frontier["system"], frontier["bits_per_value"].between(2, 2.5)
    ours, predicted = system.isin(BEST) | system.str.startswith("live"), system.str.startswith("aqua")
    kinds = {
        "published, no predictors, 2-2.5 bits": ~ours & ~predicted & two_bits,
        "AQUA-KV, 2-2.5 bits": predicted & two_bits,
        "best-long at 0.9 bits": (system == "best-long") & (frontier["nominal_bits"] == 0.9),
    }
    lost = frontier["facts_lost"]
    ranges += [(f"facts lost, {name}", model, lost[kind], "points", "11") for name, kind in kinds.items()]
    counted = claims[claims["claim"] == "... predictors counted, one sequence of 8K"]["recomputed"]
    ranges.append(("AQUA-KV's 2.16 bits, predictors counted, at 8K", "", counted, "bits", "12"))
    tokens = latency["context"].max()
    times = latency[(latency["context"] == tokens) & (latency["batch"] == 1)].set_index("system")["decode_ms"]
    for name, pattern in {"best": "best-(short|long) [0-9.]+$", "transformers' int4": "transformers quanto 4$"}.items():
        over = times[times.index.str.match(pattern)] / times["DynamicCache"]
        ranges.append((f"time of a token after {tokens:,}, {name}", "", over, "of DynamicCache's", "08"))
    rows = [
        {"finding": name, "model": model, "least": cases.min(), "most": cases.max(), "unit": unit, "page": page}
        for name, model, cases, unit, page in ranges
    ]
    return frame(rows, {f"table {name}": sha256 for name, sha256 in tables.items()})


def frontier_rows() -> pd.DataFrame:
    """Return page 11's rows, as ``figures.overview`` takes them."""
    frontier = stored_table("11_frontier")
    return by_rule(frontier, [*CONTEXTS.values()], cache_shape(frontier["model"].iloc[0]).width)
