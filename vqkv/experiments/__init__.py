"""One function per table of the study: parameters are plain literals, the result is a DataFrame.

``attrs["sources"]`` of a result names the models and corpora by hash, for the provenance.
"""

from vqkv.experiments.grouping import grouping
from vqkv.experiments.learning import codebook_learning
from vqkv.experiments.phenomena import magnitudes, phenomena

__all__ = ["codebook_learning", "grouping", "magnitudes", "phenomena"]
