"""Keys and values of many tokens on disk, a file for each batch, so that memory does not grow with their number."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save, save_file
from torch import Tensor
from tqdm import tqdm

from vqkv.capture import capture, check_batch_size, check_tokens
from vqkv.coder import Place
from vqkv.errors import DataError, FormatError
from vqkv.files import replacing, tensors_sha256
from vqkv.models import describe, weights_fingerprint
from vqkv.processes import current

HEADROOM = 1 << 28  # bytes that stay free on the disk
REMEDY = "Use fewer tokens, or another folder (TMPDIR=..., or CapturedTokens(folder=...))"


class Spill:
    """Tensors by place and batch, in a folder that is removed at the end: ``with Spill() as spill``. ``keep``: in
    ``folder`` itself, which stays, for a job that goes on after it was killed."""

    def __init__(self, folder=None, keep: bool = False):
        self.folder = folder
        try:
            if keep:
                Path(folder).mkdir(parents=True, exist_ok=True)
            self._temporary = None if keep else tempfile.TemporaryDirectory(dir=folder, prefix="vqkv-spill-")
        except OSError as error:
            raise DataError(f"no temporary folder in {folder or tempfile.gettempdir()}: {error}") from error
        self._folder = Path(folder if keep else self._temporary.name)

    def __enter__(self) -> "Spill":
        return self

    def __exit__(self, *error) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()

    def put(self, place: Place, batch: int, x: Tensor) -> None:
        """Write, under another name first. Raises ``DataError`` where that fails."""
        path = self._path(place, batch)
        try:
            if self._temporary is None:
                self._keep({"x": x.cpu().contiguous()}, path)
            else:
                save_file({"x": x.contiguous()}, path)
        except (OSError, SafetensorError) as error:
            raise DataError(f"cannot write to {self._folder}: {error}. {REMEDY}") from error

    def has(self, place: Place, batch: int) -> bool:
        """Whether it was put there, as a whole."""
        return self._path(place, batch).is_file()

    def get(self, place: Place, batch: int, device="cpu") -> Tensor:
        """Read back. Raises ``DataError`` for what was not put there, or after the end."""
        path = self._path(place, batch)
        if not path.is_file():
            hint = "delete its folder to begin anew" if self._temporary is None else "use it within its 'with'"
            raise DataError(f"{path} is gone: {hint}, and only for places it holds")
        return load_file(path, device=str(device))["x"] if self._temporary else self._kept(path).to(device)

    def _keep(self, tensors: dict[str, Tensor], path: Path) -> None:
        """Written as a whole, under a checksum: it may be read by another process, after a crash."""
        with replacing(path) as file:
            file.write(save(tensors, {"sha256": tensors_sha256(tensors.items())}))

    def _kept(self, path: Path) -> Tensor:
        try:
            with safe_open(path, "pt") as file:
                tensors, digest = {"x": file.get_tensor("x")}, (file.metadata() or {}).get("sha256")
        except (SafetensorError, OSError) as error:
            raise FormatError(f"{path} is damaged ({error}): delete its folder to begin anew") from error
        if digest != tensors_sha256(tensors.items()):
            raise FormatError(f"{path} was altered: delete its folder to begin anew")
        return tensors["x"]

    def drop(self, place: Place) -> None:
        """Remove every batch of ``place``."""
        for path in self._folder.glob(f"{place[0]}-{place[1]}-*.safetensors"):
            path.unlink()

    def _path(self, place: Place, batch: int) -> Path:
        return self._folder / f"{place[0]}-{place[1]}-{batch}.safetensors"


class CapturedTokens(Spill):
    """The keys and values of ``tokens`` (num_seqs, seq_len) in the model's dtype, captured once, ``batch_size``
    sequences at a time, into a temporary folder within ``folder``.

    Several presets can be calibrated on the same captured tokens, the reconstructions of three layers with them. Where
    processes share the job, each holds its share of every batch. ``keep``: see ``Spill``; batches that are there
    already are not captured again. Raises ``DataError`` if the disk has no room.
    """

    def __init__(
        self, model, tokens: Tensor, batch_size=8, post_rope=False, folder=None, progress: bool = True, keep=False
    ):
        check_tokens(model, tokens)
        check_batch_size(batch_size)
        super().__init__(folder, keep)
        self.processes = current()
        self.tokens, self.batch_size, self.post_rope = tokens.clone(), batch_size, post_rope
        self.about, self.dtype, self.weights = describe(model), model.dtype, weights_fingerprint(model)
        batches = tokens.split(batch_size)
        self.num_batches = len(batches)
        self._check_room(model.dtype.itemsize)
        try:
            self._capture(model, batches, progress)
        except BaseException:  # also when interrupted: a traceback would keep the folder
            self._leave()
            raise

    def _capture(self, model, batches, progress: bool) -> None:
        last = ("value", self.about["num_layers"] - 1)
        for number, batch in enumerate(tqdm(batches, "capture", unit="batch", disable=None if progress else True)):
            if self.has(last, number):
                continue
            mine = self.processes.share(batch)
            for role, layers in zip(("key", "value"), capture(model, mine, None, self.post_rope), strict=True):
                for layer, x in enumerate(layers):
                    self.put((role, layer), number, x)

    def batches(self, place: Place, device="cpu") -> Iterator[Tensor]:
        """(batch_size, num_kv_heads, seq_len, head_dim) of one place, batch by batch, always in the same order."""
        return (self.get(place, number, device) for number in range(self.num_batches))

    def layers(self, number: int, device="cpu") -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of one batch, lists over layers, as ``capture`` returns them."""
        count = range(self.about["num_layers"])
        keys, values = ([self.get((role, layer), number, device) for layer in count] for role in ("key", "value"))
        return keys, values

    def _check_room(self, itemsize: int) -> None:
        about = self.about
        values = 2 * about["num_layers"] * about["num_kv_heads"] * about["head_dim"]
        needed = self.tokens.numel() * values * itemsize
        needed += 6 * self.tokens.numel() * 4 * values // (2 * about["num_layers"])  # reconstructions of three layers
        free = shutil.disk_usage(self._folder).free - HEADROOM
        if needed > free:
            raise DataError(
                f"keys and values of {self.tokens.numel():,} tokens take {needed:,} bytes, but {self._folder} has "
                f"{max(0, free):,} to spare. {REMEDY}"
            )
