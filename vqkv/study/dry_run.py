"""``python -m vqkv.study --dry-run``: pages, models and texts that would be needed, and those out of reach."""

import itertools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import datasets
from huggingface_hub import constants
from huggingface_hub.utils import get_session
from transformers import AutoConfig, AutoTokenizer

from vqkv.data.corpus import SPLITS, check_corpus
from vqkv.errors import DataError
from vqkv.evaluation.capacity import GB, architecture
from vqkv.evaluation.footprint import weight_bytes
from vqkv.models.load import BUNDLED, LOADING_ERRORS, config_of

MODELS = ("model", "second_model")
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
HUB_SECONDS = 3  # that the hub has to answer once; else only copies on this machine are looked for


def dry_run(pages: dict[str, dict]) -> tuple[list[str], list[str]]:
    """Lines to be shown of ``pages``, {name: all its parameters}, and models and texts that cannot be reached, with the
    remedy. Neither weights nor whole texts are loaded."""
    lines, missing = [], []
    for page, parameters in pages.items():
        shown = (f"{name} = {value!r}" for name, value in parameters.items() if value != "")
        lines += [page, f"  {', '.join(shown)}"]
    online = constants.HF_HUB_OFFLINE or hub_answers()
    with _quiet_hub(), _from_here(not online):
        needed = {f"model {name}{_weights(name)}": partial(check_model, name) for name in _named(pages, *MODELS)}
        for name, split in itertools.product(_named(pages, "corpus"), SPLITS):
            needed[f"corpus {name} ({split})"] = partial(check_corpus, name, split)
        for what, reach in needed.items():
            try:
                reach()
            except ValueError as error:
                missing.append(f"{what}: {error}")
    if missing and not online:
        missing.insert(0, f"{constants.ENDPOINT} does not answer, so only this machine was searched")
    return [*lines, "needed:", *(f"  {what}" for what in needed)], missing


def _named(pages: dict[str, dict], *kinds: str) -> list[str]:
    """Values of the pages' parameters of these names, each once."""
    found = (parameters.get(kind) for parameters in pages.values() for kind in kinds)
    return list(dict.fromkeys(name for name in found if name))


def hub_answers() -> bool:
    """One request, without the hub's retries."""
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
    except Exception:  # whatever the client in use raises for "no network"
        return False
    return True


@contextmanager
def _from_here(only: bool) -> Iterator[None]:
    """Keep what is in the context off the network, if ``only``: every try would be repeated for half a minute."""
    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    if only:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def _weights(name: str) -> str:
    """Bytes of the model's weights, as text; nothing where its config is not to be had."""
    try:
        config = config_of(name)
        config.sliding_window = None  # which changes no weight
        model = architecture(config)
    except DataError:
        return ""
    return f": weights of {weight_bytes(model) / GB:.3g} GB in {str(model.dtype).removeprefix('torch.')}"


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
def _quiet_hub() -> Iterator[None]:
    """Without the hub's line for each of its retries: what cannot be reached is said once, with the remedy."""
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
