"""A kernel at a size that matters, so that it can be compiled and looked at without a GPU."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Specimen:
    """``types``: each run-time argument's Triton type (``*fp16``, ``i32``, ``fp32``), in the kernel's order;
    ``constants``: its constexpr arguments, and any integer that is 1 when the kernel is launched, as launching makes
    it one. Pointers are taken to be aligned to 16 bytes; ``divisible`` names further arguments (sizes, strides) that
    are divisible by 16. ``widest_load``: bits of the widest load from memory that its machine code must have."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 1
    divisible: tuple[str, ...] = field(default=())
    widest_load: int = 128
