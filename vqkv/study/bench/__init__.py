"""Timings and peak memory next to other people's code, by ``torch.utils.benchmark``; systems take turns in one process.

``python -m vqkv.study.bench [--only OPERATION ...] [--out FILE.csv]``: kernels against other libraries, fp16 attention
and the machine's roofline, as page 09 has them (``speed``). Page 08 has caches in use (``generation``).
"""
