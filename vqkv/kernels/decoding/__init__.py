"""Packed tokens of any format -> values: affine codes, sums of codes. See ``view``."""
