"""Triton kernels for GPUs, with the signatures of ``vqkv.kernels.reference``; without a GPU, Triton's interpreter runs
them when TRITON_INTERPRET=1 is set before this package is imported."""
