"""Every Triton kernel as it is launched at Llama-3-8B's shapes, compiled for a GPU that need not be there: run without
TRITON_INTERPRET, with compute capabilities (90: Hopper) as arguments; prints what ptxas and the disassembler say."""

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

from vqkv.kernels.affine.triton import affine_encode
from vqkv.kernels.attention.triton import decode_attention
from vqkv.kernels.decoding.triton import decode
from vqkv.kernels.entropy.code import TOTAL, make_code
from vqkv.kernels.entropy.triton import rans_decode, rans_encode
from vqkv.kernels.packing.triton import pack_codes, unpack_codes
from vqkv.kernels.rvq.triton import rvq_encode, rvq_encode_packed, rvq_statistics
from vqkv.kernels.tiles import ATTENTION
from vqkv.kernels.trellis.code import REACH
from vqkv.kernels.trellis.triton import trellis_decode, trellis_encode
from vqkv.kernels.view import Affine, Coded, Rope

TYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.int64: "i64", torch.int32: "i32",
         torch.int16: "i16", torch.uint8: "u8"}  # fmt: skip
LOAD = re.compile(r"\bLDG(?:STS)?((?:\.\w+)*)\b")
TOKENS, HEADS, HEAD_DIM = 4096, 8, 128


def zeros(*shape: int, dtype=torch.float16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def affine(bits: int) -> Affine:
    ends = zeros(1, HEADS, TOKENS, 2)
    return Affine(zeros(1, HEADS, TOKENS, HEAD_DIM * bits // 8, dtype=torch.uint8), ends, ends, bits)


def coded(dim: int, k: int, size: int, tables: int = 1, every: int = 1, strided: bool = False) -> Coded:
    bits, groups = (size - 1).bit_length(), HEAD_DIM // dim
    codes = zeros(1, HEADS, TOKENS, groups * k * bits // 8, dtype=torch.uint8)
    scale = zeros(1, HEADS, TOKENS // every, 1)
    return Coded(codes, zeros(tables, k, size, dim), bits, groups, scale, every, strided)


def encode(groups: int, dim: int, beam: int = 1, tokens: int = TOKENS * 16) -> None:
    rvq_encode_packed(zeros(tokens, groups, dim), zeros(8, 2048, dim), 11, beam)


def attend(keys, values, rope: Rope | None = None, rows: int = 4) -> None:
    decode_attention(zeros(1, HEADS * rows, 1, HEAD_DIM), keys, values, 0.1, rope)


def streams(decoded: bool) -> None:
    channels = torch.zeros(HEADS * HEAD_DIM, dtype=torch.int64)
    code = make_code([np.array([TOTAL // 2, TOTAL // 4, TOTAL // 4])], [0], channels, channels, 32)
    if decoded:
        rans_decode(zeros(2**20, dtype=torch.int16), zeros(TOKENS // 32, dtype=torch.int64), code, 32)
    else:
        rans_encode(zeros(TOKENS // 32, len(channels), 32, dtype=torch.int32), code)


def trellis(states: int) -> None:
    costs, about = zeros(33, 2 * REACH + 2, dtype=torch.float32), zeros(HEADS * HEAD_DIM, dtype=torch.int32)
    trellis_encode(zeros(64, HEADS * HEAD_DIM, dtype=torch.float32), costs, about, about, 0.05, states)


ATTENTION["programs_each"] = 4 * 132 // 2  # a CPU counts as two multiprocessors: as many shares as on an H100
CODES, ROPE = (TOKENS * HEADS, 32), Rope(torch.ones(HEAD_DIM // 2))
CASES: dict[str, tuple[int, Callable[[], object]]] = {  # name -> widest load that the first kernel must have, launch
    "rvq_encode": (128, lambda: rvq_encode(zeros(TOKENS * 64, 32), zeros(8, 2048, 32))),
    "rvq_encode many": (128, lambda: encode(4, 32)),
    "rvq_encode few": (128, lambda: encode(4, 32, tokens=64)),
    "rvq_encode 64 channels": (128, lambda: encode(2, 64)),
    "rvq_encode 128 channels": (128, lambda: encode(1, 128)),
    "rvq_encode beam": (128, lambda: encode(4, 32, beam=4)),
    "rvq_statistics": (128, lambda: rvq_statistics(zeros(TOKENS, 32), zeros(TOKENS, 8, dtype=torch.int64),
                                                   zeros(8, 2048, 32, dtype=torch.float32))),
    "pack 11": (32, lambda: pack_codes(zeros(*CODES, dtype=torch.int64), 11)),
    "unpack 11": (32, lambda: unpack_codes(zeros(CODES[0], 44, dtype=torch.uint8), 11, 32)),
    "rans_encode": (32, lambda: streams(False)),
    "rans_decode": (32, lambda: streams(True)),
    "trellis_encode": (32, lambda: trellis(8)),
    "trellis_decode": (32, lambda: trellis_decode(zeros(64, HEADS * HEAD_DIM, dtype=torch.int32), torch.ones(1), 8)),
    "attention int4 16 rows": (128, lambda: attend(affine(4), affine(4), rows=16)),
    "attention int4 32 rows": (128, lambda: attend(affine(4), affine(4), rows=32)),
    "attention product 32 rows": (128, lambda: attend(coded(4, 1, 256, 2, 64), coded(4, 1, 256, 2, 64), rows=32)),
    "attention grid": (128, lambda: attend(coded(2, 1, 256), coded(2, 1, 256))),
    "attention rvq 3x256": (128, lambda: attend(coded(8, 3, 256, every=64), coded(8, 3, 256, every=64))),
    "attention rvq 8x2048": (128, lambda: attend(coded(32, 8, 2048, strided=True), coded(32, 8, 2048), ROPE)),
}  # fmt: skip
for _bits in (2, 4, 8):
    CASES[f"affine_encode {_bits}"] = 128, lambda n=_bits: affine_encode(zeros(1, HEADS, TOKENS, HEAD_DIM), n, 64)
    CASES[f"grid {4 ** _bits if _bits < 8 else 64}"] = (
        128, lambda n={2: 4, 4: 8, 8: 6}[_bits]: rvq_encode_packed(zeros(1, 8, TOKENS, 64, 2), zeros(1, 2**n, 2), n)
    )  # fmt: skip
    CASES[f"decode affine {_bits}"] = 8 * max(4, _bits), lambda n=_bits: decode(affine(n))
for _strided in (False, True):
    CASES[f"decode rvq{' strided' * _strided}"] = 128, lambda s=_strided: decode(coded(32, 8, 2048, strided=s))
for _name, _packed in {"int4": affine(4), "int2": affine(2), "product": coded(4, 1, 256, 2, 64)}.items():
    CASES[f"attention {_name}"] = 128, lambda packed=_packed: attend(packed, packed)


def launches(run: Callable[[], object]) -> list[tuple[ASTSource, dict]]:
    """What ``run`` would have Triton compile: sources, with the specializations of a launch, and options."""
    found = []

    def record(kernel, *args, grid, warmup, **named):
        options = {name: named.pop(name) for name in ("num_warps", "num_stages") if name in named}
        signature, constants, aligned = {}, {}, []
        values = dict(zip(kernel.arg_names, args)) | named
        for place, parameter in enumerate(kernel.params):
            value, kind = values[parameter.name], "constexpr"
            if not parameter.is_constexpr and value is not None and not (isinstance(value, int) and value == 1):
                tensor = isinstance(value, torch.Tensor)
                kind = f"*{TYPES[value.dtype]}" if tensor else "fp32" if isinstance(value, float) else "i32"
                aligned += [(place,)] * (kind != "fp32" and (value.data_ptr() if tensor else value) % 16 == 0)
            else:
                constants[parameter.name] = value
            signature[parameter.name] = kind
        attributes = {place: [["tt.divisibility", 16]] for place in aligned}
        found.append((ASTSource(kernel, signature, constants, attributes), options))

    before, JITFunction.run = JITFunction.run, record
    try:
        run()
    finally:
        JITFunction.run = before
    return found


def compiled(source: ASTSource, options: dict, arch: int, wanted: int) -> dict:
    """Bytes of stack a thread and of shared memory a program, registers a thread, and bits of the widest load, which
    the disassembler takes a quarter of a second to find and is not asked where none is ``wanted``."""
    code = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.asm["cubin"])
        file.flush()
        asked = ["-res-usage", *["-sass"] * bool(wanted)]
        command = [triton.knobs.nvidia.cuobjdump.path, *asked, file.name]
        machine = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    widths = [int(width) for load in LOAD.findall(machine) for width in re.findall(r"\.(64|128)\b", load) or [32]]
    bulk = 128 * bool(re.search(r"UTMALDG|UBLKCP", machine))
    found = {name: int(re.search(rf"{name.upper()[:5]}\w*:(\d+)", machine)[1]) for name in ("reg", "stack")}
    return found | {"shared": code.metadata.shared, "widest": max([*widths, bulk])}


if __name__ == "__main__":
    rows = []
    for name, (widest, run) in CASES.items():
        for number, (source, options) in enumerate(launches(run)):
            wanted = widest if number == 0 else 0
            for arch in map(int, sys.argv[1:]):
                about = {"arch": arch, "case": name, "kernel": source.fn.__name__, "wanted": wanted}
                rows.append(about | compiled(source, options, arch, wanted))
                print(rows[-1], file=sys.stderr, flush=True)
    print(json.dumps(rows))
