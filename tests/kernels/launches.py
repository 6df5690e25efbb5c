"""Every Triton kernel as it is launched at Llama-3-8B's shapes, compiled for a GPU that need not be there: run without
TRITON_INTERPRET, with compute capabilities (90: Hopper) as arguments; prints what ptxas says."""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable

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

TYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.int64: "i64", torch.int32: "i32",
         torch.int16: "i16", torch.uint8: "u8"}  # fmt: skip
TOKENS, HEADS, HEAD_DIM = 4096, 8, 128


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


attention.PROGRAMS_EACH = 4 * 132 // 2  # a CPU counts as two multiprocessors: as many shares as on an H100
LAYER = {"tokens": TOKENS, "heads": HEADS, "batch": 1}
CODES, ROPE = (TOKENS * HEADS, 32), Rope(torch.ones(HEAD_DIM // 2))
PRODUCT = coded(32, 4, 1, 8, tables=2, scales=1, every=64, **LAYER)
GRID, SHORT = coded(64, 2, 1, 8, scales=1, **LAYER), coded(16, 8, 3, 8, scales=1, every=64, **LAYER)
RVQ, STRIDED = (coded(4, 32, 8, 11, scales=1, strided=strided, **LAYER) for strided in (False, True))
GROUPS = [[1] * 10 + [2] * 12 + [4] * 9 + [8] * 3 + [16] * 2] * HEADS  # 2.25 bits a value
LIVE = mapped(GROUPS, HEAD_DIM, tokens=TOKENS, batch=1)
CASES: dict[str, Callable[[], object]] = {
    "rvq_encode": lambda: rvq_encode(zeros(TOKENS * 64, 32), zeros(8, 2048, 32)),
    "rvq_encode few": lambda: rvq_encode(zeros(64, 32), zeros(8, 2048, 32)),
    "rvq_encode 64 channels": lambda: rvq_encode(zeros(TOKENS * 64, 64), zeros(8, 2048, 64)),
    "rvq_encode 128 channels": lambda: rvq_encode(zeros(TOKENS * 64, 128), zeros(8, 2048, 128)),
    "grid": lambda: rvq_encode(zeros(1, HEADS, TOKENS, 64, 2), zeros(1, 256, 2)),
    "pack 11": lambda: pack_codes(zeros(*CODES, dtype=torch.int64), 11),
    "unpack 11": lambda: unpack_codes(zeros(CODES[0], 44, dtype=torch.uint8), 11, 32),
    "rans_encode": lambda: streams(False),
    "rans_decode": lambda: streams(True),
    "decode rvq": lambda: decode(RVQ),
    "decode rvq strided": lambda: decode(STRIDED),
    "attention product": lambda: attend(PRODUCT, PRODUCT),
    "attention product 32 rows": lambda: attend(PRODUCT, PRODUCT, rows=32),
    "attention grid": lambda: attend(GRID, GRID),
    "attention rvq 3x256": lambda: attend(SHORT, SHORT),
    "attention rvq 8x2048": lambda: attend(STRIDED, RVQ, ROPE),
    "attention live": lambda: attend(LIVE, LIVE, Rope(torch.ones(HEAD_DIM // 2), 5, 16)),
    "attention live no rope": lambda: attend(LIVE, LIVE),
}
for _bits, _rows in ((2, 4), (4, 4), (4, 16), (4, 32), (8, 4)):
    _packed = affine(HEAD_DIM, _bits, 64, **LAYER)
    CASES[f"affine_encode {_bits}"] = lambda n=_bits: affine_encode(zeros(1, HEADS, TOKENS, HEAD_DIM), n, 64)
    CASES[f"decode affine {_bits}"] = lambda x=_packed: decode(x)
    CASES[f"attention int{_bits} {_rows} rows"] = lambda x=_packed, n=_rows: attend(x, x, rows=n)


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


if __name__ == "__main__":
    rows = []
    for name, run in CASES.items():
        for source, options in launches(run):
            for arch in map(int, sys.argv[1:]):
                about = {"arch": arch, "case": name, "kernel": source.fn.__name__}
                rows.append(about | compiled(source, options, arch))
                print(rows[-1], file=sys.stderr, flush=True)
    print(json.dumps(rows))
