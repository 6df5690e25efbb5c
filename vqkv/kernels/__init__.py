"""Hot loops. ``reference`` is the truth, ``cpu`` and ``bits`` are its fast twins with the same signatures, ``dispatch``
picks."""

from vqkv.kernels.dispatch import by_byte, lookup, pack_codes, rvq_candidates, rvq_decode, rvq_encode, unpack_codes

__all__ = ["by_byte", "lookup", "pack_codes", "rvq_candidates", "rvq_decode", "rvq_encode", "unpack_codes"]
