"""A kernel at a size that matters, so that it can be compiled and looked at without a GPU."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Specimen:
    """``types``: each run-time argument's Triton type (``*fp16``, ``i32``, ``fp32``), in the kernel's order;
    ``constants``: its constexpr arguments. Pointers are taken to be aligned to 16 bytes; ``divisible`` names further
    arguments (sizes, strides) that are divisible by 16."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 1
    divisible: tuple[str, ...] = field(default=())
