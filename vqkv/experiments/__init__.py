"""One function per table of the study: parameters are plain literals, the result is a DataFrame.

``attrs["sources"]`` of a result names the models and corpora by hash, for the provenance.
"""

from vqkv.experiments import tasks
from vqkv.experiments.audit import audited_tables, claims_audit
from vqkv.experiments.capacity import blog_claims, capacity_table
from vqkv.experiments.depth import gaussian_depth, residual_depth
from vqkv.experiments.entropy import code_entropy
from vqkv.experiments.frontier import (
    against_published,
    finalists,
    frontier,
    halving_search,
    proxy_correlations,
    what_to_use,
)
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
    "against_ours", "against_published", "algebra", "attention_times", "audited_tables", "beside_published",
    "blog_claims", "capacity_table", "choices", "claims_audit", "code_entropy", "codebook_learning",
    "error_propagation", "eviction", "finalists", "frontier", "gaussian_depth", "generation_latency", "generation_peak",
    "grouping", "halving_search", "kernel_speed", "leaderboard", "loss_by_position", "magnitudes", "memory_growth",
    "phenomena", "predictability", "predictor_ablation", "proxy_correlations", "residual_depth", "systems", "tasks",
    "threshold_sweep", "tier_ladder", "trade", "what_to_use", "within_budget",
]  # fmt: skip
