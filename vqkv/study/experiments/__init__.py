"""The study's tables: an ``experiment`` each, of a ``Subject`` and plain literals, and functions of their rows.

``attrs["sources"]`` of a table names the models and texts by hash, for the provenance.
"""

# ruff: noqa: F401
from vqkv.study.bench.generation import latency as generation_latency
from vqkv.study.bench.generation import peak_memory as generation_peak
from vqkv.study.bench.speed import speed as kernel_speed
from vqkv.study.experiments.audit import audited_tables, claims_audit
from vqkv.study.experiments.comparisons import paired_ablation, paired_ratio, proxy_correlations, with_families
from vqkv.study.experiments.designs import BEST
from vqkv.study.experiments.facts import finetuning, given_back, retrieval
from vqkv.study.experiments.frontier import chosen_settings, design_search, frontier, tuning
from vqkv.study.experiments.injected import injected
from vqkv.study.experiments.ladder import code_entropy, eviction, tier_ladder
from vqkv.study.experiments.learning import against_own, calibration_text, codebook_learning
from vqkv.study.experiments.overview import contents, findings, frontier_rows
from vqkv.study.experiments.own import defining_text, neighbours, own_preset
from vqkv.study.experiments.phenomena import magnitudes, noise_floors, phenomena
from vqkv.study.experiments.predictability import algebra, predictability
from vqkv.study.experiments.predictors import (
    beside_published,
    error_propagation,
    over_default,
    predictor_ablation,
    predictor_choices,
)
from vqkv.study.experiments.residual_vq import (
    gaps,
    gaussian_depth,
    group_sizes,
    grouping,
    product_against_residual,
    residual_depth,
)
from vqkv.study.experiments.restoring import break_even, chat, restored_quality, restoring_times
from vqkv.study.experiments.rule import (
    against_best,
    by_rule,
    cache_shape,
    chosen,
    pays_from,
    searched_systems,
    share_of_bits,
)
from vqkv.study.experiments.speed import (
    against_ours,
    first_difference,
    greedy_text,
    read_in_place,
    residual_lengths,
    trade,
)
from vqkv.study.experiments.thresholds import claimed_sweep, modes, sequence_damage, threshold_sweep
from vqkv.study.subject import Subject
