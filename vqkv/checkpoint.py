"""What a long job has done so far, in a folder: killed at any moment, it goes on from its last finished step."""

import hashlib
import json
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from vqkv.errors import DataError, FormatError
from vqkv.files import replacing, tensors_sha256
from vqkv.processes import current

FORMAT = "vqkv-checkpoint 1"


class Checkpoint:
    """Named steps in ``folder``, each with tensors and notes, written as a whole or not at all.

    ``job``: plain literals that say which job this is: model, tokens, settings. Processes that share the job share the
    folder. Raises ``FormatError`` if it holds another job's steps, naming the first thing that differs, and
    ``DataError`` if it cannot be used.
    """

    def __init__(self, folder, job: dict):
        self.folder = Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise FormatError(f"{folder} is a file: name a folder for the checkpoint")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.job = json.loads(json.dumps({"format": FORMAT} | job))
            if self._header.exists():
                self._check(_json(self._header))
        except OSError as error:
            raise DataError(f"checkpoint {folder} cannot be used: {error}. Name another folder") from error

    @contextmanager
    def alone(self):
        """Inside, no other job may use the folder. Raises ``DataError`` if one does."""
        lock = FileLock(self.folder / "lock")
        try:
            if current().first:
                lock.acquire(timeout=0)
        except Timeout as error:
            raise DataError(f"checkpoint {self.folder} is in use by another process: wait, or name another") from error
        try:
            yield self
        finally:
            lock.release()

    def begin(self) -> None:
        """Say in the folder whose it is."""
        if not self._header.exists():
            with replacing(self._header) as file:
                file.write(json.dumps(self.job, indent=1).encode())

    def save(self, name: str, tensors: dict[str, Tensor], **notes) -> None:
        """Write step ``name``, in place of an earlier one of that name."""
        self.begin()
        tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        about = {"notes": json.dumps(notes), "sha256": _sha256(tensors, notes)}
        with replacing(self._path(name)) as file:
            file.write(save({key: tensor.clone() for key, tensor in tensors.items()}, metadata=about))

    def load(self, name: str) -> tuple[dict[str, Tensor], dict] | None:
        """Tensors (on the CPU) and notes of step ``name``; None if it was not finished. Raises ``FormatError`` for an
        altered file."""
        path = self._path(name)
        if not path.is_file():
            return None
        try:
            with safe_open(path, "pt") as file:
                about, tensors = file.metadata() or {}, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            notes = json.loads(about["notes"])
            altered = about["sha256"] != _sha256(tensors, notes)
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise FormatError(f"{path} is no step of a checkpoint ({error}): {self._remedy()}") from error
        if altered:
            raise FormatError(f"{path} was altered: {self._remedy()}")
        return tensors, notes

    def load_together(self, name: str) -> tuple[dict[str, Tensor], dict] | None:
        """``load``, called by all processes. Raises ``DataError`` if they do not find the same."""
        found = self.load(name)
        told = current().exchange(json.dumps(found and found[1]).encode())
        if any(message != told[0] for message in told):
            raise DataError(f"processes find different steps in {self.folder}: name a folder on a disk that all share")
        return found

    @property
    def _header(self) -> Path:
        return self.folder / "job.json"

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def _check(self, found: dict) -> None:
        difference = _first_difference(found, self.job)
        if difference:
            where, theirs, ours = difference
            raise FormatError(
                f"checkpoint {self.folder} is of another job: its {' '.join(where)} is {str(theirs)[:80]}, not "
                f"{str(ours)[:80]}. Name another folder, or {self._remedy()}"
            )

    def _remedy(self) -> str:
        return f"delete {self.folder} to begin anew"


def _first_difference(theirs, ours, where: tuple[str, ...] = ()):
    """(where, theirs, ours) of the first leaf in which two JSON values differ; None if they are equal."""
    if theirs == ours:
        return None
    if isinstance(theirs, dict) and isinstance(ours, dict):
        pairs = [(key, theirs.get(key), ours.get(key)) for key in ours | theirs]
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        pairs = [("", *pair) for pair in zip(theirs, ours, strict=True)]
    else:
        return where, theirs, ours
    return next(_first_difference(a, b, (*where, *([key] if key else []))) for key, a, b in pairs if a != b)


def _json(path: Path) -> dict:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FormatError(f"{path} is not JSON ({error}): delete its folder to begin anew") from error
    if not isinstance(found, dict):
        raise FormatError(f"{path} is not the header of a checkpoint: delete its folder to begin anew")
    return found


def _sha256(tensors: dict[str, Tensor], notes: dict) -> str:
    return hashlib.sha256((tensors_sha256(sorted(tensors.items())) + json.dumps(notes)).encode()).hexdigest()
