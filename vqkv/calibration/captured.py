"""Keys and values of many tokens on disk, a file for each batch, so that memory does not grow with their number."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from vqkv.calibration.error_costs import metrics
from vqkv.codecs.predictive import ROLES, Place
from vqkv.errors import DataError
from vqkv.models.capture import capture
from vqkv.models.identity import identity
from vqkv.models.load import describe

REMEDY = "Use fewer tokens, or another folder (TMPDIR=..., or CapturedTokens(folder=...))"


class Spill:
    """Tensors by place and batch, in a folder that is removed at the end: ``with Spill() as spill``."""

    def __init__(self, folder=None):
        self.folder = folder
        self._temporary = tempfile.TemporaryDirectory(dir=folder, prefix="vqkv-spill-")
        self._folder = Path(self._temporary.name)

    def __enter__(self) -> "Spill":
        return self

    def __exit__(self, *error) -> None:
        self._temporary.cleanup()

    def put(self, place: Place, batch: int, x: Tensor) -> None:
        """Write. Raises ``DataError`` where that fails."""
        try:
            save_file({"x": x.contiguous()}, self._path(place, batch))
        except (OSError, SafetensorError) as error:
            raise DataError(f"cannot write to {self._folder}: {error}. {REMEDY}") from error

    def get(self, place: Place, batch: int, device="cpu") -> Tensor:
        """Read back."""
        return load_file(self._path(place, batch), device=str(device))["x"]

    def drop(self, place: Place) -> None:
        """Remove every batch of ``place``."""
        for path in self._folder.glob(f"{place[0]}-{place[1]}-*.safetensors"):
            path.unlink()

    def _path(self, place: Place, batch: int) -> Path:
        return self._folder / f"{place[0]}-{place[1]}-{batch}.safetensors"


class CapturedTokens(Spill):
    """The keys and values of ``tokens`` (num_seqs, seq_len) in the model's dtype, captured once, ``batch_size``
    sequences at a time, into a temporary folder within ``folder``, for any number of presets. Raises
    ``DataError`` if the disk is full."""

    def __init__(self, model, tokens: Tensor, batch_size=8, pre_rope=True, folder=None, progress: bool = True):
        super().__init__(folder)
        self.tokens, self.batch_size, self.pre_rope = tokens.clone(), batch_size, pre_rope
        self.about, self.weights = describe(model), identity(model)
        self._metrics: dict[str, dict[Place, Tensor]] = {}
        batches = tokens.split(batch_size)
        self.num_batches = len(batches)
        try:
            for number, batch in enumerate(tqdm(batches, "capture", unit="batch", disable=None if progress else True)):
                for role, layers in zip(ROLES, capture(model, batch, None, pre_rope), strict=True):
                    for layer, x in enumerate(layers):
                        self.put((role, layer), number, x)
        except BaseException:  # also when interrupted: a traceback would keep the folder
            self._temporary.cleanup()
            raise

    def batches(self, place: Place, device="cpu") -> Iterator[Tensor]:
        """(batch_size, num_kv_heads, seq_len, head_dim) of one place, batch by batch, always in the same order."""
        return (self.get(place, number, device) for number in range(self.num_batches))

    def layers(self, number: int, device="cpu") -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of one batch, lists over layers, as ``capture`` returns them."""
        count = range(self.about["num_layers"])
        keys, values = ([self.get((role, layer), number, device) for layer in count] for role in ROLES)
        return keys, values

    def metrics(self, model, costs: str = "loss") -> dict[Place, Tensor]:
        """``costs.metrics`` of these tokens, found once; ``model`` is the one that they were captured from."""
        if costs not in self._metrics:
            self._metrics[costs] = metrics(costs, model, self.tokens, self.pre_rope)
        return self._metrics[costs]
