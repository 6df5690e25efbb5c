"""The machine code of every kernel, without a GPU: ``python -m vqkv.kernels.gpu.disassembly [--arch 90] [--kernel X]``.

Runs only where TRITON_INTERPRET is not set. The compiler and the disassembler are those in Triton's wheel.
"""

import argparse
import importlib
import json
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vqkv.kernels.gpu.specimen import Specimen

MODULES = ("encode", "statistics", "decode", "bits", "affine", "grid", "attention")
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)\s*(.*?)\s*;")
WIDTHS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128}
LOADS, SHARED_LOADS, STORES = ("LDG", "LDGSTS"), ("LDS", "LDSM"), ("STG",)
SPILLS = ("LDL", "STL")
HEADER = (
    f"{'regs':>4} {'stack':>5} {'spills':>6} {'shared':>7} {'instr':>6} {'loop':>5}  "
    f"{'loads':18} {'shared loads':18} {'stores':12} operations (of the loop)"
)


@dataclass(frozen=True)
class Disassembly:
    """What a specimen compiles to. Sizes in bytes; widths in bits; counts are of instructions in the code, not of what
    runs. ``loop``: of the largest loop that has no other in it; empty where there is none."""

    name: str
    arch: int
    num_warps: int
    registers: int  # per thread
    stack: int  # per thread
    shared: int  # per program
    spills: int  # loads and stores of local memory
    wanted_load: int  # bits, the specimen's ``widest_load``
    loads: dict[int, int]  # width -> count, of device memory
    shared_loads: dict[int, int]
    stores: dict[int, int]  # of device memory
    instructions: int
    operations: dict[str, int]  # FFMA, HMMA, ... -> count
    loop: dict[str, int]

    @property
    def widest_load(self) -> int:
        """Bits; 0 where nothing is loaded. Bulk copies (TMA) count as 128."""
        bulk = any(name.startswith(("UTMALDG", "UBLKCP")) for name in self.operations)
        return max([*self.loads, 128 * bulk])


def specimens() -> list[Specimen]:
    """Of all modules with kernels."""
    modules = [importlib.import_module(f"vqkv.kernels.gpu.{name}") for name in MODULES]
    return [specimen for module in modules for specimen in module.SPECIMENS]


def disassemble(specimen: Specimen, arch: int) -> Disassembly:
    """Compile for compute capability ``arch`` (90: Hopper) and read the machine code."""
    compiled = compile_for(specimen, arch)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, code = _dump(file.name, "-res-usage"), _dump(file.name, "-sass")
    instructions = [(int(at, 16), *rest) for at, *rest in INSTRUCTION.findall(code)]
    operations = Counter(operation for _, operation, _, _ in instructions)
    return Disassembly(
        name=specimen.name,
        arch=arch,
        num_warps=specimen.num_warps,
        registers=int(re.search(r"REG:(\d+)", usage)[1]),
        stack=int(re.search(r"STACK:(\d+)", usage)[1]),
        shared=compiled.metadata.shared,
        spills=sum(operations[name] for name in SPILLS),
        wanted_load=specimen.widest_load,
        loads=_widths(instructions, LOADS),
        shared_loads=_widths(instructions, SHARED_LOADS),
        stores=_widths(instructions, STORES),
        instructions=len(instructions),
        operations=dict(operations.most_common()),
        loop=_loop(instructions),
    )


def compile_for(specimen: Specimen, arch: int):
    """Triton's compiled kernel; ``asm`` has each stage (``ttgir``, ``ptx``, ``cubin``). Cached on disk by Triton."""
    kernel = specimen.kernel
    signature = {name: specimen.types.get(name, "constexpr") for name in kernel.arg_names}
    aligned = [
        (index,)
        for index, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name in specimen.divisible
    ]
    source = ASTSource(kernel, signature, specimen.constants, {key: [["tt.divisibility", 16]] for key in aligned})
    options = {"num_warps": specimen.num_warps, "num_stages": specimen.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def _dump(path: str, option: str) -> str:
    tool = triton.knobs.nvidia.cuobjdump.path
    return subprocess.run([tool, option, path], capture_output=True, text=True, check=True).stdout


def _widths(instructions: list[tuple], names: tuple[str, ...]) -> dict[int, int]:
    kinds = [modifiers.split(".") for _, operation, modifiers, _ in instructions if operation in names]
    return dict(sorted(Counter(max(WIDTHS.get(m, 0) for m in kind) or 32 for kind in kinds).items()))


def _loop(instructions: list[tuple]) -> dict[str, int]:
    """Operations between the target of a branch backwards and the branch, of the largest loop without another in it."""
    spans = []
    for at, operation, _, operands in instructions:
        target = re.search(r"0x([0-9a-f]+)$", operands) if operation == "BRA" else None
        if target and int(target[1], 16) < at:
            spans.append((int(target[1], 16), at))
    innermost = [(a, b) for a, b in spans if not any((a, b) != (c, d) and a <= c and d <= b for c, d in spans)]
    inside = [[i[1] for i in instructions if a <= i[0] <= b] for a, b in innermost]
    return dict(Counter(max(inside, key=len, default=[])).most_common())


def _row(d: Disassembly) -> str:
    widths = ["+".join(f"{n}x{w}" for w, n in kind.items()) or "-" for kind in (d.loads, d.shared_loads, d.stores)]
    busiest = " ".join(f"{name}:{n}" for name, n in list((d.loop or d.operations).items())[:9])
    numbers = f"{d.registers:4} {d.stack:5} {d.spills:6} {d.shared:7} {d.instructions:6} {sum(d.loop.values()):5}"
    return f"{d.name:36} {numbers}  {widths[0]:18} {widths[1]:18} {widths[2]:12} {busiest}"


def main() -> None:
    """Print a row for every specimen, or JSON for a program to read."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--kernel", default="", help="only specimens with this in their name")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chosen = [specimen for specimen in specimens() if options.kernel in specimen.name]
    if options.json:
        found = [disassemble(specimen, options.arch) for specimen in chosen]
        print(json.dumps([asdict(one) | {"widest_load": one.widest_load} for one in found]))
        return
    print(f"sm_{options.arch:<33}", HEADER)
    for specimen in chosen:
        print(_row(disassemble(specimen, options.arch)), flush=True)


if __name__ == "__main__":
    main()
