"""``python -m vqkv.study --dry-run``: pages, models and texts that would be needed, and those out of reach."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import datasets
from huggingface_hub import constants
from huggingface_hub.utils import get_session

from vqkv.data.corpus import SPLITS, check_corpus
from vqkv.errors import DataError
from vqkv.evaluation.capacity import GB
from vqkv.evaluation.configs import architecture, check_model, config_of, quiet_hub
from vqkv.evaluation.footprint import weight_bytes

MODELS = ("model", "second_model")
HUB_SECONDS = 3  # that the hub has to answer once; else only copies on this machine are looked for


@dataclass
class DryRun:
    """Lines to be shown (``lines``) of ``pages``, {name: all its parameters}, and models and texts that cannot be
    reached, with the remedy (``missing``). Neither weights nor whole texts are loaded."""

    pages: dict[str, dict]
    lines: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def __post_init__(self):
        for page, parameters in self.pages.items():
            shown = (f"{name} = {value!r}" for name, value in parameters.items() if value != "")
            self.lines += [page, f"  {', '.join(shown)}"]
        online = constants.HF_HUB_OFFLINE or hub_answers()
        self.lines.append("needed:")
        with quiet_hub(), _from_here(not online):
            for name in self._named(*MODELS):
                self._need(f"model {name}", lambda name=name: check_model(name), _weights(name))
            for name in self._named("corpus"):
                for split in SPLITS:
                    self._need(f"corpus {name} ({split})", lambda name=name, split=split: check_corpus(name, split))
        if self.missing and not online:
            self.missing.insert(0, f"{constants.ENDPOINT} does not answer, so only this machine was searched")

    def _named(self, *kinds: str) -> list[str]:
        """Values of the pages' parameters of these names, each once."""
        found = (parameters.get(kind) for parameters in self.pages.values() for kind in kinds)
        return list(dict.fromkeys(name for name in found if name))

    def _need(self, what: str, reach: Callable[[], object], about: str = "") -> None:
        self.lines.append(f"  {what}{about}")
        try:
            reach()
        except ValueError as error:
            self.missing.append(f"{what}: {error}")


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
        config, _ = config_of(name)
        config.sliding_window = None  # which changes no weight
        model = architecture(config)
    except DataError:
        return ""
    return f": weights of {weight_bytes(model) / GB:.3g} GB in {str(model.dtype).removeprefix('torch.')}"
