"""Every kernel compiles to good machine code for Hopper and Ampere: Triton's wheel brings the compiler, so no GPU is
needed. One process per architecture, as this one may have Triton's interpreter switched on."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton here")

SHARED = {90: 227 * 1024, 80: 163 * 1024}  # what a program may have, in bytes
REGISTERS = 255


def disassemblies(arch: int) -> list[dict]:
    environment = dict(os.environ, TRITON_INTERPRET="0")
    command = [sys.executable, "-m", "vqkv.kernels.gpu.disassembly", "--arch", str(arch), "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("arch", SHARED)
def test_machine_code_neither_spills_nor_loads_narrowly(arch):
    found = disassemblies(arch)
    assert found and len({one["name"] for one in found}) == len(found)
    for one in found:
        assert one["stack"] == one["spills"] == 0, one
        assert one["shared"] <= SHARED[arch] and one["registers"] <= REGISTERS, one
        assert one["widest_load"] >= one["wanted_load"], one
