"""The look of figures, and one function per figure."""

# ruff: noqa: F401
from vqkv.study.figures.codebooks import (
    depth_curves,
    distance_to_bound,
    group_size_lines,
    grouping_bars,
    learning_curves,
    magnitudes_by_layer,
    other_calibrations,
    unused_codes,
)
from vqkv.study.figures.costs import chat_lines, in_place, memory_dots, time_dumbbells, waiting
from vqkv.study.figures.explore import coloured_chat, conversation, explained_by_layer, vector_stages
from vqkv.study.figures.frontier import ablation_dots, compared, frontier, overview, proxy_dots, verdict_bars
from vqkv.study.figures.losses import (
    eviction_curves,
    kl_by_size,
    ladder_bars,
    ratios_by_threshold,
    threshold_curves,
    told_bars,
    tuning_dots,
)
from vqkv.study.figures.prediction import (
    choice_dots,
    context_costs,
    evr_bars,
    evr_by_layer,
    predicted_plane,
    quantised_inputs,
)
from vqkv.study.figures.speed import attention_lines, bound_dots, search_lines
from vqkv.study.figures.style import PALETTE, made, render, show, use_style
