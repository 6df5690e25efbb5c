"""Trellis-coded quantization of rows of values: the best path of codes, and the way back."""
