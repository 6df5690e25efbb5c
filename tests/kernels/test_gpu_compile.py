"""Every Triton kernel, as it is launched at Llama-3-8B's shapes, compiles to machine code that fits Hopper and Ampere.
Triton's wheel brings the compiler, so no GPU is needed; in a process of its own, as this one may have Triton's
interpreter switched on."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from views import affine, coded, mapped

from vqkv.kernels.attention import triton as attention
from vqkv.kernels.entropy.code import TOTAL, make_code
from vqkv.kernels.entropy.triton import rans_decode, rans_encode
from vqkv.kernels.formats.triton import affine_encode, decode
from vqkv.kernels.packing.triton import pack_codes, unpack_codes
from vqkv.kernels.rvq.triton import rvq_encode
from vqkv.kernels.view import Rope

SHARED = {90: 227 * 1024, 80: 163 * 1024}  # what a program may have, in bytes
KERNELS = {"_encode", "_affine_encode", "_pack", "_unpack", "_coded", "_affine", "attend", "attend_grouped",
           "_rans_encode", "_rans_decode"}  # fmt: skip
TYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.int64: "i64", torch.int32: "i32",
         torch.int16: "i16", torch.uint8: "u8"}  # fmt: skip
TOKENS, HEADS, HEAD_DIM = 1024, 8, 128  # more would be launched with the same settings


def zeros(*shape: int, dtype=torch.float16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def attend(keys, values, rope: Rope | None = None, rows: int = 4) -> None:
    attention.decode_attention(zeros(1, HEADS * rows, 1, HEAD_DIM), keys, values, 0.1, rope)


def streams(decoded: bool) -> None:
    channels = torch.zeros(HEADS * HEAD_DIM, dtype=torch.int64)
    code = make_code([np.array([TOTAL // 2, TOTAL // 4, TOTAL // 4])], [0], channels, channels)
    if decoded:
        rans_decode(zeros(2**20, dtype=torch.int16), zeros(TOKENS // 32, dtype=torch.int64), code, 32)
    else:
        rans_encode(zeros(TOKENS // 32, len(channels), 32, dtype=torch.int32), code)


def cases() -> dict[str, Callable[[], object]]:
    """Name launches; what they read is made once."""
    attention.PROGRAMS_EACH = 4 * 132 // 2  # a CPU counts as two multiprocessors: as many shares as on an H100
    layer = {"tokens": TOKENS, "heads": HEADS, "batch": 1}
    product, grid = coded(32, 4, 1, 8, tables=2, scales=1, every=64, **layer), coded(64, 2, 1, 8, scales=1, **layer)
    short = coded(16, 8, 3, 8, scales=1, every=64, **layer)
    rvq, strided = (coded(4, 32, 8, 11, scales=1, strided=strided, **layer) for strided in (False, True))
    groups = [[1] * 10 + [2] * 12 + [4] * 9 + [8] * 3 + [16] * 2] * HEADS  # 2.25 bits a value
    live = mapped(groups, HEAD_DIM, tokens=TOKENS, batch=1)
    named: dict[str, Callable[[], object]] = {
        "rvq_encode few": partial(rvq_encode, zeros(64, 32), zeros(8, 2048, 32)),
        "grid": partial(rvq_encode, zeros(1, HEADS, TOKENS, 64, 2), zeros(1, 256, 2)),
        "pack 11": partial(pack_codes, zeros(TOKENS * HEADS, 32, dtype=torch.int64), 11),
        "unpack 11": partial(unpack_codes, zeros(TOKENS * HEADS, 44, dtype=torch.uint8), 11, 32),
        "rans_encode": partial(streams, False),
        "rans_decode": partial(streams, True),
        "decode rvq": partial(decode, rvq),
        "attention product": partial(attend, product, product),
        "attention product 32 rows": partial(attend, product, product, rows=32),
        "attention grid": partial(attend, grid, grid),
        "attention rvq 3x256": partial(attend, short, short),
        "attention rvq 8x2048": partial(attend, strided, rvq, Rope(torch.ones(HEAD_DIM // 2))),
        "attention live": partial(attend, live, live, Rope(torch.ones(HEAD_DIM // 2), 5, 16)),
        "attention live no rope": partial(attend, live, live),
    }
    for dim in (32, 64, 128):
        named[f"rvq_encode {dim} channels"] = partial(rvq_encode, zeros(TOKENS * 64, dim), zeros(8, 2048, dim))
    for bits, rows in ((2, 4), (4, 4), (4, 16), (4, 32), (8, 4)):
        packed = affine(HEAD_DIM, bits, 64, **layer)
        named[f"affine_encode {bits}"] = partial(affine_encode, zeros(1, HEADS, TOKENS, HEAD_DIM), bits, 64)
        named[f"decode affine {bits}"] = partial(decode, packed)
        named[f"attention int{bits} {rows} rows"] = partial(attend, packed, packed, rows=rows)
    return named


def launches(run: Callable[[], object]) -> list[tuple[ASTSource, dict]]:
    """What ``run`` would have Triton compile: sources, with the specializations of a launch, and options."""
    sources = []

    def record(kernel, *args, grid, warmup, **named):
        options = {name: named.pop(name) for name in ("num_warps", "num_stages") if name in named}
        signature, constants, aligned = {}, {}, []
        values = dict(zip(kernel.arg_names, args)) | named
        for index, parameter in enumerate(kernel.params):
            value, kind = values[parameter.name], "constexpr"
            if not parameter.is_constexpr and value is not None and not (isinstance(value, int) and value == 1):
                tensor = isinstance(value, torch.Tensor)
                kind = f"*{TYPES[value.dtype]}" if tensor else "fp32" if isinstance(value, float) else "i32"
                aligned += [(index,)] * (kind != "fp32" and (value.data_ptr() if tensor else value) % 16 == 0)
            else:
                constants[parameter.name] = value
            signature[parameter.name] = kind
        attributes = {index: [["tt.divisibility", 16]] for index in aligned}
        sources.append((ASTSource(kernel, signature, constants, attributes), options))

    before, JITFunction.run = JITFunction.run, record
    try:
        run()
    finally:
        JITFunction.run = before
    return sources


def compiled(source: ASTSource, options: dict, arch: int) -> dict:
    """Bytes of stack a thread and of shared memory a program, and registers a thread."""
    code = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    resources = {name: int(re.search(rf"{name.upper()[:5]}\w*:(\d+)", usage)[1]) for name in ("reg", "stack")}
    return resources | {"shared": code.metadata.shared}


def test_machine_code_spills_nothing():
    """Of every launch on Hopper; on Ampere of each kernel's that shares most memory."""
    alone = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, __file__], env=alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    for arch in SHARED:
        assert {row["kernel"] for row in rows if row["arch"] == arch} == KERNELS
    for row in rows:
        assert row["stack"] == 0 and row["reg"] <= 255 and row["shared"] <= SHARED[row["arch"]], row


if __name__ == "__main__":
    rows, largest = [], {}
    for name, run in cases().items():
        for source, options in launches(run):
            kernel = source.fn.__name__
            rows.append({"arch": 90, "case": name, "kernel": kernel} | compiled(source, options, 90))
            if rows[-1]["shared"] >= largest.get(kernel, (0,))[0]:
                largest[kernel] = rows[-1]["shared"], name, source, options
    for kernel, (_, name, source, options) in largest.items():
        rows.append({"arch": 80, "case": name, "kernel": kernel} | compiled(source, options, 80))
    print(json.dumps(rows))
