"""How figures look, and one function per figure."""

from vqkv.figures.grouping import GROUPING_COLOURS, grouping_bars
from vqkv.figures.learning import code_usage, learning_curves
from vqkv.figures.phenomena import channel_ratios, magnitude_boxes, recall_bars
from vqkv.figures.style import PALETTE, STYLE, render, save, use_style

__all__ = [
    "GROUPING_COLOURS", "PALETTE", "STYLE", "channel_ratios", "code_usage", "grouping_bars", "learning_curves",
    "magnitude_boxes", "recall_bars", "render", "save", "use_style",
]  # fmt: skip
