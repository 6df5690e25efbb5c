"""What kernels keep for a process: its precision and tables, while several threads compute."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from vqkv.kernels.precision import full_precision


def test_full_precision_lasts_until_the_last_thread_leaves():
    def within(entered, leave) -> str:
        with full_precision(torch.device("cpu")):
            entered.set()
            leave.wait(30)
            return torch.get_float32_matmul_precision()

    torch.set_float32_matmul_precision("high")
    try:
        events = [(threading.Event(), threading.Event()) for _ in range(2)]
        with ThreadPoolExecutor(2) as pool:
            works = []
            for entered, leave in events:
                works.append(pool.submit(within, entered, leave))
                entered.wait(30)
            for work, (_, leave) in zip(works, events, strict=True):
                leave.set()
                assert work.result(30) == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
