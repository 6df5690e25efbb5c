"""One function per table of the study: parameters are plain literals, the result is a DataFrame.

``attrs["sources"]`` of a result names the models and corpora by hash, for the provenance.
"""

from vqkv.experiments.depth import gaussian_depth, residual_depth
from vqkv.experiments.entropy import code_entropy
from vqkv.experiments.grouping import grouping
from vqkv.experiments.ladder import eviction, tier_ladder
from vqkv.experiments.learning import codebook_learning
from vqkv.experiments.phenomena import magnitudes, phenomena
from vqkv.experiments.systems import systems
from vqkv.experiments.thresholds import threshold_sweep

__all__ = [
    "code_entropy", "codebook_learning", "eviction", "gaussian_depth", "grouping", "magnitudes", "phenomena",
    "residual_depth", "systems", "threshold_sweep", "tier_ladder",
]  # fmt: skip
