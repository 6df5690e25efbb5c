"""The machine that a result was measured on."""

import platform
import re
from pathlib import Path


def processor() -> str:
    """Return the CPU's model name."""
    listed = Path("/proc/cpuinfo")  # Linux; elsewhere Python knows
    names = re.findall(r"^model name\s*:\s*(.*\S)", listed.read_text(), re.MULTILINE) if listed.is_file() else []
    return names[0] if names else platform.processor() or platform.machine()
