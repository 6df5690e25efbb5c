"""Every test runs offline, without a display, and on one thread: under xdist the processes share the cores."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "Agg"
os.environ["OMP_NUM_THREADS"] = "1"
for steering in ("VQKV_OUT", "VQKV_RECOMPUTE", "VQKV_SCHEDULER", "VQKV_WORKERS"):
    os.environ.pop(steering, None)

import torch  # noqa: E402

if not torch.cuda.is_available():  # kernels then run on CPU tensors; real compiles happen in processes of their own
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

from vqkv.runtime.allocator import keep_freed_memory  # noqa: E402

torch.set_num_threads(1)
keep_freed_memory()  # faster, see there
