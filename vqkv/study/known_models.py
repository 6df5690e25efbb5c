"""Why a model that a profile names cannot be reached."""

import logging
import os
from contextlib import contextmanager

from transformers import AutoConfig, AutoTokenizer

from vqkv.errors import DataError
from vqkv.models.load import BUNDLED, LOADING_ERRORS

OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")


def check_model(name: str) -> None:
    """Fetch config and tokenizer, no weights. Raises ``DataError`` with the remedy: offline, gated, misspelt."""
    path = BUNDLED.get(name, name)
    try:
        AutoConfig.from_pretrained(path)
        AutoTokenizer.from_pretrained(path)
    except LOADING_ERRORS as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        raise DataError(f"{_remedy(name, str(error))} ({reason})") from error


def _remedy(name: str, error: str) -> str:
    if os.path.isdir(name):
        return "the folder lacks a config.json or a tokenizer that transformers can read"
    if "gated" in error.lower():
        return f"ask for access on https://huggingface.co/{name} and log in with `hf auth login`"
    if any(os.environ.get(variable, "").lower() in ("1", "true", "yes", "on") for variable in OFFLINE):
        return f"this process is offline and has no copy: unset {', '.join(OFFLINE)}, or name a local folder"
    if "is not a local folder and is not a valid model identifier" in error:
        return "check the spelling; a private model needs `hf auth login`"
    return "check the network, or name a local folder (-p model=FOLDER)"


@contextmanager
def quiet_hub():
    """Without the hub's line for each of its retries: what cannot be reached is said once, with the remedy."""
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
