"""How figures look, and one function per figure."""

from vqkv.figures.audit import claim_dots
from vqkv.figures.capacity import context_dots
from vqkv.figures.depth import depth_curves, distance_to_bound, systems_plane
from vqkv.figures.frontier import contexts, frontier, proxy_bars, search_dots
from vqkv.figures.generation import choose, loss_by_position, memory_lines, time_dumbbells
from vqkv.figures.grouping import GROUPING_COLOURS, grouping_bars
from vqkv.figures.learning import code_usage, learning_curves
from vqkv.figures.phenomena import channel_ratios, magnitude_boxes, recall_bars
from vqkv.figures.predictability import evr_bars, evr_heatmap, quantised_inputs
from vqkv.figures.predictors import ablation_bars, context_costs, predicted_plane, propagation
from vqkv.figures.speed import attention_lines, bound_dots, format_look, look_of, search_lines
from vqkv.figures.style import PALETTE, STYLE, render, save, use_style
from vqkv.figures.tasks import change_grid, depth_lines, perplexity_dots
from vqkv.figures.thresholds import (
    entropy_bars,
    eviction_curves,
    ladder_bars,
    ratios_by_threshold,
    sequence_spread,
    threshold_curves,
)

__all__ = [
    "GROUPING_COLOURS", "PALETTE", "STYLE", "ablation_bars", "attention_lines", "bound_dots", "change_grid",
    "channel_ratios", "choose", "claim_dots", "code_usage", "context_costs", "context_dots", "contexts", "depth_curves",
    "depth_lines", "distance_to_bound", "entropy_bars", "eviction_curves", "evr_bars", "evr_heatmap", "format_look",
    "frontier", "grouping_bars", "ladder_bars", "learning_curves", "look_of", "loss_by_position", "magnitude_boxes",
    "memory_lines", "perplexity_dots", "predicted_plane", "propagation", "proxy_bars", "quantised_inputs",
    "ratios_by_threshold", "recall_bars", "render", "save", "search_dots", "search_lines", "sequence_spread",
    "systems_plane", "threshold_curves", "time_dumbbells", "use_style",
]  # fmt: skip
