"""Page 00: what the other pages found, in one table."""

import pandas as pd

from vqkv.study.experiments.common import frame
from vqkv.study.experiments.designs import BEST
from vqkv.study.experiments.rule import by_rule, cache_shape, share_of_bits
from vqkv.study.tables import stored

READ = ("08_latency", "11_frontier", "12_claims")
CONTEXTS = {"8,192": "8k", "131,072": "128k"}
LEAST, MOST = 0.9, 3.0  # bits of KVTC within which the whole curve is compared
TWO_BITS = (2.0, 2.5)
BASELINE = "DynamicCache"


def contents() -> dict[str, str]:
    """The tables that are read, by name, with a hash of what each holds: other contents, another table of findings."""
    return {name: found[1] for name in READ if (found := stored(name))}


def findings(tables: dict[str, str]) -> pd.DataFrame:
    """The study's findings in numbers: ``least`` and ``most`` of the cases that each is about, their ``unit`` and the
    ``page`` that has them; ``model``: empty where it is about none of them. ``tables``: of ``contents``; without one of
    them its findings are left out."""
    known = {name: stored(name)[0] for name in tables}
    makers = {
        _bits: ("11_frontier",),
        _facts: ("11_frontier",),
        _told: ("12_claims",),
        _time: ("08_latency",),
    }
    rows = [row for make, needed in makers.items() if {*needed} <= {*known} for row in make(*map(known.get, needed))]
    return frame(rows, {f"table {name}": sha256 for name, sha256 in tables.items()})


def frontier_rows() -> pd.DataFrame:
    """Page 11's rows, as ``figures.overview`` takes them."""
    return _seen(stored("11_frontier")[0])


def _seen(frontier: pd.DataFrame) -> pd.DataFrame:
    return by_rule(frontier, [*CONTEXTS.values()], cache_shape(frontier["model"].iloc[0]).width)


def _row(finding: str, cases: pd.Series, unit: str, page: str, model: str = "") -> dict:
    return {"finding": finding, "model": model, "least": cases.min(), "most": cases.max(), "unit": unit, "page": page}


def _bits(frontier: pd.DataFrame) -> list[dict]:
    seen, model, found = _seen(frontier), frontier["model"].iloc[0], []
    for tokens, name in CONTEXTS.items():
        share = share_of_bits(seen, name, LEAST, MOST)
        ends = pd.Series([share["lowest"], share["highest"]])
        found.append(_row(f"best over KVTC at equal KL, {tokens} tokens", ends, "of its bits", "11", model))
    return found


def _facts(frontier: pd.DataFrame) -> list[dict]:
    ours = frontier["system"].isin(BEST) | frontier["system"].str.startswith("live")
    two_bits, predicted = frontier["bits_per_value"].between(*TWO_BITS), frontier["system"].str.startswith("aqua")
    kinds = {
        "facts lost, published, no predictors, 2-2.5 bits": ~ours & ~predicted & two_bits,
        "facts lost, AQUA-KV, 2-2.5 bits": predicted & two_bits,
        "facts lost, best-long at 0.9 bits": (frontier["system"] == "best-long") & (frontier["nominal_bits"] == 0.9),
    }
    model = frontier["model"].iloc[0]
    return [_row(name, frontier.loc[kind, "facts_lost"], "points", "11", model) for name, kind in kinds.items()]


def _told(claims: pd.DataFrame) -> list[dict]:
    counted = claims[claims["claim"] == "... predictors counted, one sequence of 8K"]["recomputed"]
    return [_row("AQUA-KV's 2.16 bits, predictors counted, at 8K", counted, "bits", "12")]


def _time(latency: pd.DataFrame) -> list[dict]:
    tokens = latency["context"].max()
    longest = latency[(latency["context"] == tokens) & (latency["batch"] == 1)]
    times = longest.set_index("system")["decode_ms"] / longest.loc[longest["system"] == BASELINE, "decode_ms"].item()
    kinds = {"best": "best-(short|long) [0-9.]+$", "transformers' int4": "transformers quanto 4$"}
    return [
        _row(
            f"time of a token after {tokens:,}, {name}",
            times[times.index.str.match(pattern)],
            "of DynamicCache's",
            "08",
        )
        for name, pattern in kinds.items()
    ]
