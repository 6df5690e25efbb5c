"""The look of figures, and one function per figure."""

# ruff: noqa: F401
from vqkv.study.figures.audit import verdict_bars
from vqkv.study.figures.calibration_text import other_calibrations
from vqkv.study.figures.compared import compared
from vqkv.study.figures.depth import depth_curves, distance_to_bound
from vqkv.study.figures.explore import coloured_chat, conversation, explained_by_layer, vector_stages
from vqkv.study.figures.frontier import ablation_dots, frontier, overview, proxy_dots
from vqkv.study.figures.generation import in_place, memory_dots, time_dumbbells
from vqkv.study.figures.grouping import group_size_lines, grouping_bars
from vqkv.study.figures.injected import kl_by_size
from vqkv.study.figures.learning import learning_curves, unused_codes
from vqkv.study.figures.phenomena import magnitudes_by_layer
from vqkv.study.figures.predictability import evr_bars, evr_by_layer, quantised_inputs
from vqkv.study.figures.predictors import choice_dots, context_costs, predicted_plane
from vqkv.study.figures.restoring import chat_lines, waiting
from vqkv.study.figures.speed import attention_lines, bound_dots, search_lines
from vqkv.study.figures.style import PALETTE, made, render, show, use_style
from vqkv.study.figures.tasks import told_bars, tuning_dots
from vqkv.study.figures.thresholds import (
    eviction_curves,
    ladder_bars,
    ratios_by_threshold,
    threshold_curves,
)
