"""One function per table of the study: parameters are plain literals, the result is a DataFrame.

``attrs["sources"]`` of a result names the models and corpora by hash, for the provenance.
"""

from vqkv.experiments import tasks
from vqkv.experiments.capacity import blog_claims, capacity_table
from vqkv.experiments.depth import gaussian_depth, residual_depth
from vqkv.experiments.entropy import code_entropy
from vqkv.experiments.generation import choices, generation_latency, generation_peak, loss_by_position, memory_growth
from vqkv.experiments.grouping import grouping
from vqkv.experiments.ladder import eviction, tier_ladder
from vqkv.experiments.learning import codebook_learning
from vqkv.experiments.phenomena import magnitudes, phenomena
from vqkv.experiments.predictability import algebra, predictability
from vqkv.experiments.predictors import beside_published, error_propagation, predictor_ablation, within_budget
from vqkv.experiments.speed import against_ours, attention_times, kernel_speed, trade
from vqkv.experiments.systems import systems
from vqkv.experiments.tasks import leaderboard
from vqkv.experiments.thresholds import threshold_sweep

__all__ = [
    "against_ours", "algebra", "attention_times", "beside_published", "blog_claims", "capacity_table", "choices",
    "code_entropy", "codebook_learning", "error_propagation", "eviction", "gaussian_depth", "generation_latency",
    "generation_peak", "grouping", "kernel_speed", "leaderboard", "loss_by_position", "magnitudes", "memory_growth",
    "phenomena", "predictability", "predictor_ablation", "residual_depth", "systems", "tasks", "threshold_sweep",
    "tier_ladder", "trade", "within_budget",
]  # fmt: skip
