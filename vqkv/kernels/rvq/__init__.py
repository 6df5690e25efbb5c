"""Residual vector quantization: a vector is the sum of one code from each of K codebooks.

Encoding is Algorithm 1 of "Residual vector quantization for KV cache compression": r = x; for every codebook,
k = argmin_c |r - c|^2 and r = r - c_k. Beam search keeps several sequences of codes from stage to stage. A grid for
pairs of values (HIGGS) is one codebook of two channels.
"""
