"""Affine quantization of groups of channels, as KIVI, Quanto and HQQ store them (KIVI, section 3; asymmetric min-max).

code = round((x - low) / (high - low) * (2^bits - 1)) and x' = low + code / (2^bits - 1) * (high - low), with the ends
low and high of a group in fp16.
"""
