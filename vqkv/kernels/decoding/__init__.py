"""Packed tokens of any format -> values: affine codes, sums of codes, a prediction added, RoPE. See ``packed``."""
