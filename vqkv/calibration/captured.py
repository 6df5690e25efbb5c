"""Keys and values of many tokens on disk, a file for each batch, so that memory does not grow with their number."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from vqkv.calibration.error_costs import FISHER_SEQS, FISHER_TOKENS, fisher_metrics
from vqkv.codecs.predictive import ROLES, LayerRole
from vqkv.errors import DataError
from vqkv.models.capture import capture
from vqkv.models.load import describe
from vqkv.models.metrics import attention_metrics


class TensorFolder:
    """Tensors by role, layer and batch, in a temporary folder: ``with TensorFolder() as tensors``."""

    def __init__(self):
        self._temporary = tempfile.TemporaryDirectory(prefix="vqkv-")
        self.folder = Path(self._temporary.name)

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        self._temporary.cleanup()

    def put(self, role: str, layer: int, batch: int, x: Tensor) -> None:
        """Write a tensor. Raises ``DataError`` where that fails."""
        try:
            save_file({"x": x.contiguous()}, self.folder / f"{role}-{layer}-{batch}")
        except (OSError, SafetensorError) as error:
            raise DataError(f"cannot write to {self.folder}: {error}. Use fewer tokens, or set TMPDIR") from error

    def get(self, role: str, layer: int, batch: int, device="cpu") -> Tensor:
        """Read a tensor."""
        return load_file(self.folder / f"{role}-{layer}-{batch}", device=str(device))["x"]

    def drop(self, role: str, layer: int) -> None:
        """Remove every batch of a layer and role."""
        for path in self.folder.glob(f"{role}-{layer}-*"):
            path.unlink()


class CapturedTokens(TensorFolder):
    """Keys and values of ``tokens`` (num_seqs, seq_len) in the model's dtype, for any number of presets.

    They are captured once, ``batch_size`` sequences at a time. Raises ``DataError`` if the disk is full."""

    def __init__(self, model, tokens: Tensor, batch_size=8, pre_rope: int = True, progress: bool = True):
        super().__init__()
        self.tokens, self.batch_size, self.pre_rope = tokens.clone(), batch_size, pre_rope
        self.about, batches = describe(model), tokens.split(batch_size)
        self.num_batches = len(batches)
        self._metrics: dict[str, dict[LayerRole, Tensor]] = {}
        try:
            for number, batch in enumerate(tqdm(batches, "capture", unit="batch", disable=None if progress else True)):
                for role, layers in zip(ROLES, capture(model, batch, None, pre_rope), strict=True):
                    for layer, x in enumerate(layers):
                        self.put(role, layer, number, x)
        except BaseException:  # also when interrupted: a traceback would keep the folder
            self._temporary.cleanup()
            raise

    def batches(self, role: str, layer: int, device="cpu") -> Iterator[Tensor]:
        """Read one layer and role, always in the same order: (batch_size, num_kv_heads, seq_len, head_dim)."""
        return (self.get(role, layer, number, device) for number in range(self.num_batches))

    def metrics(self, model, costs: str = "loss") -> dict[LayerRole, Tensor]:
        """Compute once what errors cost to the ``loss`` (``fisher_metrics``) or in ``attention``
        (``attention_metrics``); ``model``: the one that these tokens were captured from."""
        if costs not in self._metrics and costs == "attention":
            self._metrics[costs] = attention_metrics(model, self.tokens[:FISHER_SEQS, :FISHER_TOKENS])
        elif costs not in self._metrics:
            self._metrics[costs] = fisher_metrics(model, self.tokens, self.pre_rope)
        return self._metrics[costs]
