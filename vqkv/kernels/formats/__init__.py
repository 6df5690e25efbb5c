"""Values <-> packed tokens, a format for each class of ``view``.

Affine codes, as KIVI, Quanto and HQQ store them (KIVI, section 3; asymmetric min-max): code = round((x - low) / (high -
low) * (2^bits - 1)), with the ends low and high of a group in fp16. Sums of codes: their search is in ``rvq``. Groups
of a byte: of 256 vectors the nearest.
"""
