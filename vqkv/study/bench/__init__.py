"""Timings and peak memory beside other people's code, each system in turn in one process.

``python -m vqkv.study.bench [--only OPERATION ...] [--out FILE.csv]``: kernels against other libraries, fp16 attention
and the machine's roofline, as page 09 has them. ``python -m vqkv.study.bench generate``: what a cache adds to the time
of a generated token, as page 08 has it; page 08 also has how much memory that takes at its peak (``peak``).
"""
