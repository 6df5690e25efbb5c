"""``python -m vqkv.study.reproduce``: one case of every stored table is computed again and compared.

All cases take hours (``python -m vqkv.study --recompute``). ``--seed`` draws which, and the order of tables; tables
that are no experiments are computed in full. Left out: times and peaks of memory, and what ``--minutes`` do not reach.
"""

import importlib
import math
import random
import time
from typing import Annotated, Any

import pandas as pd
import typer
from tqdm import tqdm

from vqkv.study import subject
from vqkv.study.shared import forget
from vqkv.study.sweep import Experiment, with_subject
from vqkv.study.tables import provenance, stored_names, stored_table

OF_A_MACHINE = ("latency", "peak_memory", "read_in_place", "speed", "restoring_times", "chat")
SIX_DIGITS = 1e-5  # what a stored number is rounded to
SPREAD = 0.03  # by which an Intel Xeon's and an AMD EPYC's numbers differed at most (page 11's search: 2.6%)
NOT_COMPARED = ("_each", "_floor")  # numbers of single windows; fp16's own error, which is rounding


def again(name: str, seed: int, until: float = math.inf) -> dict:
    """Compute a case of the stored table ``name`` with the parameters of its provenance. Returns ``table``, ``case``,
    ``rows``, ``seconds``, the stored one's ``device``, and the largest relative ``difference`` of a number, in
    ``column``; NaN, and nothing else, where ``until`` (of ``time.time``) is over."""
    if time.time() > until:
        return {"table": name, "case": "not reached", "difference": math.nan}
    subject.EXACT_BYTES = 1 << 30  # one case reads a model's own logits once, and other tables run with it
    record, start = provenance(name), time.perf_counter()
    module, _, function = record["function"].rpartition(".")
    try:
        function, parameters = getattr(importlib.import_module(module), function), with_subject(record["parameters"])
        if isinstance(function, Experiment):
            chosen = random.Random(f"{seed} {name}").choice(function.cases(**parameters))
            case, rows = chosen.name, pd.DataFrame(chosen.result()["rows"])
        else:
            table = function(**parameters)
            case, rows = "all", table.reset_index(drop=table.index.names == [None])
    except Exception as error:  # one table that fails must not hide the others
        return {"table": name, "case": f"{type(error).__name__}: {error}", "difference": math.inf}
    finally:
        forget()
    about = {"table": name, "case": case, "rows": len(rows), "device": record["device"]}
    return about | {"seconds": time.perf_counter() - start} | compared(rows, stored_table(name))


def compared(rows: pd.DataFrame, kept: pd.DataFrame) -> dict:
    """Return the largest relative ``difference`` from the nearest row of the same words (infinite: none), and where."""
    shared = [str(name) for name in kept if name in rows and not str(name).endswith(NOT_COMPARED)]
    numbers = [name for name in shared if pd.api.types.is_numeric_dtype(kept[name]) and kept[name].dtype != bool]
    words = [name for name in shared if name not in numbers]
    worst: dict[str, Any] = {"difference": 0.0, "column": ""}
    row: Any
    for _, row in rows.iterrows():
        same = kept[(kept[words].astype(object).fillna("") == row[words].fillna("")).all(axis=1)]
        if same.empty:
            return {"difference": math.inf, "column": f"no row with {row[words].to_dict()}"}
        ours, theirs = row[numbers].astype(float), same[numbers].astype(float)
        larger = theirs.abs().clip(lower=ours.abs(), axis=1)
        differences = ((theirs - ours).abs() / larger.where(larger > 0, 1.0)).fillna(math.inf)
        differences = differences.mask(theirs.isna() & ours.isna(), 0.0)  # none where both are missing
        nearest = differences.iloc[int(differences.max(axis=1).argmin())]
        if nearest.max() > worst["difference"]:
            worst = {"difference": nearest.max(), "column": nearest.idxmax()}
    return worst


app = typer.Typer(add_completion=False)


@app.command()
def main(
    only: Annotated[str, typer.Option(help="Tables by the start of their names.")] = "",
    seed: Annotated[int, typer.Option(help="Draws the cases and the order of tables.")] = 0,
    minutes: Annotated[float, typer.Option(help="Begin no table after so many.")] = math.inf,
):
    """Compute one case of every stored table again, and compare.

    Ends with 1 where one fails, has no such row, or differs by more than processors do (``SPREAD``).
    """
    records = [provenance(name) for name in stored_names() if name.startswith(only)]
    records = [record for record in records if record["function"].rpartition(".")[2] not in OF_A_MACHINE]
    random.Random(seed).shuffle(records)
    until = time.time() + 60 * minutes
    differences = []
    for record in tqdm(records, "reproduce", unit="table"):
        row = again(record["name"], seed, until)
        tqdm.write(f"{row.pop('table'):<16} {_verdict(**row)}")
        differences.append(row["difference"])
    reached = [each for each in differences if not math.isnan(each)]
    typer.echo(f"{sum(each < SIX_DIGITS for each in reached)} of {len(reached)} tables give the same six digits again")
    typer.echo(f"{len(differences) - len(reached)} tables were not reached" * (len(differences) > len(reached)))
    raise typer.Exit(1 if any(each > SPREAD for each in reached) else 0)


def _verdict(case: str, difference: float, column: str = "", rows: int = 0, seconds=0.0, device: str = "") -> str:
    if math.isnan(difference):
        return case
    verdict = "same" if difference < SIX_DIGITS else f"FAILS {column}".rstrip()
    if SIX_DIGITS <= difference < math.inf:
        verdict = "differs" if difference <= SPREAD else "FAILS: differs"
        verdict += f" by up to {100 * difference:.2g}% ({column}; stored: {device})"
    return f"{verdict}: {case}" + f", {rows} rows in {seconds:.0f} s" * (rows > 0)


if __name__ == "__main__":
    app()
