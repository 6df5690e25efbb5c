"""Every kernel compiles to machine code that fits Hopper and Ampere: Triton's wheel brings the compiler, so no GPU is
needed. In a process of its own, as this one may have Triton's interpreter switched on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED = {90: 227 * 1024, 80: 163 * 1024}  # what a program may have, in bytes
KERNELS = {"_encode", "_affine_encode", "_pack", "_unpack", "_coded", "_affine", "attend", "attend_grouped",
           "_rans_encode", "_rans_decode"}  # fmt: skip


@pytest.fixture(scope="module")
def launch_rows():
    """Of each architecture, the rows that ``launches.py`` prints."""
    command = [sys.executable, Path(__file__).parent / "launches.py", *map(str, SHARED)]
    done = subprocess.run(command, env=dict(os.environ, TRITON_INTERPRET="0"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("arch", SHARED)
def test_machine_code_spills_nothing(launch_rows, arch):
    rows = [one for one in launch_rows if one["arch"] == arch]
    assert {one["kernel"] for one in rows} == KERNELS
    for one in rows:
        assert one["stack"] == 0 and one["reg"] <= 255 and one["shared"] <= SHARED[arch], one
