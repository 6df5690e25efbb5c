"""Notebook 08: what a compressed cache costs and saves while generating."""

import pandas as pd

from vqkv.study.bench.generation import latency, peak_memory
from vqkv.study.experiments.common import frame


def generation_latency(**settings) -> pd.DataFrame:
    """Time by ``bench.generation.latency``; no case of a sweep, as all systems take turns in one process."""
    return frame(latency(**settings), {})


def read_in_place(geometries: list[str], **settings) -> pd.DataFrame:
    """``generation_latency`` of several shapes, where attention reads packed tokens as they lie, if kernels can."""
    runs = [latency(geometry=geometry, attention="vqkv_packed", **settings) for geometry in geometries]
    return frame([row for rows in runs for row in rows], {})


def generation_peak(**settings) -> pd.DataFrame:
    """Resident memory by ``bench.generation.peak_memory``, which differs a little from run to run; nor a sweep."""
    return frame(peak_memory(**settings), {})
