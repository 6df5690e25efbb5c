"""``python -m vqkv.study --dry-run``: what would be run, what that is expected to take, and what can be reached."""

import os
import shutil
import tempfile
from dataclasses import dataclass, field

import torch

from vqkv import estimate
from vqkv.configs import check_model, config_of, quiet_hub
from vqkv.corpus import check_corpus
from vqkv.errors import DataError
from vqkv.estimate import Rates, gigabytes
from vqkv.footprint import weight_bytes
from vqkv.model_size import ModelSize, model_size
from vqkv.models import DEVICE_MAPS

MODELS = ("model", "second_model")
CORPORA = {"corpus": ("train", "test")}


@dataclass
class DryRun:
    """Of ``pages``, {name: all its parameters}: lines to be shown (``lines``), and which models and data cannot be
    reached, with the remedy (``missing``). No weights are loaded."""

    pages: dict[str, dict]
    lines: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def __post_init__(self):
        self._sizes: dict[tuple[str, str], ModelSize | str] = {}
        self._rates: dict[tuple[str, str], Rates] = {}
        with quiet_hub():
            for page, parameters in self.pages.items():
                self._describe(page, parameters)
            self._reach()

    def _describe(self, page: str, parameters: dict) -> None:
        self.lines += [page, f"  {', '.join(f'{name} = {value!r}' for name, value in _chosen(parameters).items())}"]
        dtype = parameters.get("dtype") or ("float32" if _device(parameters) == "cpu" else "")
        sizes = [self._size(name, dtype) for name in _models(parameters)]
        known = [size for size in sizes if isinstance(size, ModelSize)]
        self.lines += [f"  {reason}" for reason in sizes if isinstance(reason, str)]
        if known:
            self.lines += [f"  memory: {self._memory(page, parameters, known)}"]
        work = estimate.page_work(page, parameters, known) if len(known) == len(sizes) and sizes else None
        if work is None:
            self.lines += ["  time: not estimated"]
        else:
            rates = self._rate(parameters, known[0])
            self.lines += [f"  time: about {_duration(rates.seconds(work))} ({rates.where})"]

    def _memory(self, page: str, parameters: dict, sizes: list[ModelSize]) -> str:
        """Of the model that needs most."""
        found = [estimate.page_memory(page, parameters, size) for size in sizes]
        most = max(found, key=lambda kinds: sum(kinds.values()))
        needed, (there, where) = sum(most.values()), _memory_of(_device(parameters))
        text = f"{gigabytes(needed)} ({', '.join(f'{kind} {gigabytes(count)}' for kind, count in most.items())})"
        text += f"; {where}" + ("" if there is None else f" has {gigabytes(there)}")
        text += ": too little, use fewer or shorter sequences" if there is not None and needed > there else ""
        disk, free = max(estimate.page_disk(page, parameters, size) for size in sizes), _free_disk()
        if not disk:
            return text
        room = ": too little, set TMPDIR" if disk > free else ""
        return f"{text}\n  disk: {gigabytes(disk)} in {tempfile.gettempdir()}, which has {gigabytes(free)}{room}"

    def _size(self, name: str, dtype: str) -> ModelSize | str:
        """Or why it is not known."""
        if (name, dtype) not in self._sizes:
            try:
                config, source = config_of(name)
                self._sizes[name, dtype] = size = model_size(name, config, dtype or None)
                weights = gigabytes(weight_bytes(size.model))
                self.lines += [f"  {name}: weights of {weights} in {size.model.dtype}, from {source}"]
            except DataError as error:
                self._sizes[name, dtype] = str(error)
        return self._sizes[name, dtype]

    def _rate(self, parameters: dict, size: ModelSize) -> Rates:
        device, dtype = _device(parameters), size.model.dtype
        key = (device, str(dtype))
        if key not in self._rates:
            self._rates[key] = estimate.measured_rates(dtype, device)
        return self._rates[key]

    def _reach(self) -> None:
        self.lines += ["reached:"]
        pages = self.pages.values()
        for name in dict.fromkeys(name for parameters in pages for name in _models(parameters)):
            self._try(f"model {name}", lambda name=name: check_model(name))
        wanted = [
            (parameters[kind], split)
            for parameters in pages
            for kind, splits in CORPORA.items()
            if parameters.get(kind)
            for split in splits
        ]
        for name, split in dict.fromkeys(wanted):
            self._try(f"corpus {name} ({split})", lambda name=name, split=split: check_corpus(name, split))

    def _try(self, what: str, reach) -> None:
        try:
            reach()
            self.lines.append(f"  {what}")
        except ValueError as error:
            self.missing.append(f"{what}: {error}")


def _device(parameters: dict) -> str:
    """A device map spreads a model over cards."""
    device = parameters.get("device", "cpu")
    return "cuda" if device in DEVICE_MAPS else device


def _models(parameters: dict) -> list[str]:
    return [parameters[kind] for kind in MODELS if parameters.get(kind)]


def _chosen(parameters: dict) -> dict:
    return {name: value for name, value in parameters.items() if name != "recompute" and value != ""}


def _memory_of(device: str) -> tuple[int | None, str]:
    if device == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine"
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory, torch.cuda.get_device_name(0)
    return None, f"no {device} device is here to compare with"


def _free_disk() -> int:
    return shutil.disk_usage(tempfile.gettempdir()).free


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
