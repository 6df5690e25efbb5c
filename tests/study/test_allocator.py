"""Freed memory that stays with the process, counted in pages that the system had to fetch."""

import platform
import subprocess
import sys

import pytest

ASK = """
import resource, torch
from vqkv.study.allocator import give_back, keep_freed_memory

def fetched(count):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        torch.ones(1 << 24)  # 64 MiB, freed at once
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() >> 20

usual = fetched(4)
keep_freed_memory()
kept = min(fetched(4) for _ in range(4))  # a small object in the freed place makes the heap grow by one tensor, once
held = resident()
give_back()
print(usual, kept, held - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="says something about glibc")
def test_freed_memory_is_kept_until_it_is_given_back():
    answer = subprocess.run([sys.executable, "-c", ASK], check=True, capture_output=True, text=True).stdout
    usual, kept, returned = map(int, answer.split())
    assert kept < usual / 100
    assert returned > 60
