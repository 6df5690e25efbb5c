"""What a long job has done so far, in a folder: killed at any moment, it goes on from its last finished step."""

import hashlib
import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from vqkv.errors import FormatError
from vqkv.files import replacing, tensors_sha256

FORMAT = "vqkv-checkpoint 1"


class Checkpoint:
    """Named steps in ``folder``, each with tensors and notes, written as a whole or not at all.

    ``job``: plain literals that say which job this is: model, tokens, settings. Raises ``FormatError`` if the folder
    holds another job's steps, naming the first thing that differs.
    """

    def __init__(self, folder, job: dict):
        self.folder = Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise FormatError(f"{folder} is a file: name a folder for the checkpoint")
        self.folder.mkdir(parents=True, exist_ok=True)
        job = json.loads(json.dumps({"format": FORMAT} | job))
        path = self.folder / "job.json"
        if path.is_file():
            self._check(_json(path), job)
        else:
            with replacing(path) as file:
                file.write(json.dumps(job, indent=1).encode())

    def save(self, name: str, tensors: dict[str, Tensor], **notes) -> None:
        """Write step ``name``, in place of an earlier one of that name."""
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

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def _check(self, found: dict, job: dict) -> None:
        for key in job | found:
            if found.get(key) != job.get(key):
                raise FormatError(
                    f"checkpoint {self.folder} is of another job: its {key} is {str(found.get(key))[:80]}, not "
                    f"{str(job.get(key))[:80]}. Name another folder, or {self._remedy()}"
                )

    def _remedy(self) -> str:
        return f"delete {self.folder} to begin anew"


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
