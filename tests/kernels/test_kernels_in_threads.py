"""What kernels keep for a process: its precision and tables, while several threads compute."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from vqkv.kernels.derived import remembered, tables_of
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


def test_tables_are_listed_while_another_thread_adds_some():
    """Threads take turns far more often than usual."""
    build, x, before = remembered(lambda tensor, key: key), torch.ones(2), sys.getswitchinterval()

    def add() -> None:
        for key in range(20_000):
            build(x, key)

    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(1) as pool:
            adding = pool.submit(add)
            while not adding.done():
                assert tables_of(x) is not None
            adding.result(30)
    finally:
        sys.setswitchinterval(before)
