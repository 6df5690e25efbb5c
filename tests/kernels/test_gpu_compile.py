"""Every kernel compiles to good machine code for Hopper and Ampere: Triton's wheel brings the compiler, so no GPU is
needed. One process per architecture, as this one may have Triton's interpreter switched on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SHARED = {90: 227 * 1024, 80: 163 * 1024}  # what a program may have, in bytes
KERNELS = {"_encode", "encode_beam", "_sum_pieces", "_join_pieces", "_pack", "_unpack", "_coded", "_affine", "_attend",
           "_combine"}  # fmt: skip


@pytest.mark.parametrize("arch", SHARED)
def test_machine_code_neither_spills_nor_loads_narrowly(arch):
    command = [sys.executable, Path(__file__).parent / "launches.py", str(arch)]
    done = subprocess.run(command, env=dict(os.environ, TRITON_INTERPRET="0"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {one["kernel"] for one in found} == KERNELS
    for one in found:
        assert one["stack"] == 0 and one["reg"] <= 255 and one["shared"] <= SHARED[arch], one
        assert one["widest"] >= one["wanted"], one
