"""Hot loops. ``reference`` is the truth, ``cpu`` its fast twin with the same signatures, ``dispatch`` picks."""

from vqkv.kernels.dispatch import rvq_candidates, rvq_decode, rvq_encode

__all__ = ["rvq_candidates", "rvq_decode", "rvq_encode"]
