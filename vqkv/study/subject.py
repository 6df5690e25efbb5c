"""The subject of an experiment: a model and its texts, named by plain literals and loaded when they are first read."""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from vqkv.cache.compressor import Compressor
from vqkv.calibration.calibrate import calibrate
from vqkv.calibration.captured import CapturedTokens
from vqkv.data.corpus import fingerprint as corpus_fingerprint
from vqkv.data.corpus import load_corpus
from vqkv.evaluation.exact import ExactPass
from vqkv.models.load import describe, load_model
from vqkv.models.load import fingerprint as model_fingerprint
from vqkv.presets import Preset
from vqkv.study.shared import per_process

EXACT_BYTES = 6 << 30  # that a process remembers of a model's own logits


@dataclass(frozen=True)
class Subject:
    """A model, the text that it is calibrated on and the text that it is judged on, with their hashes in ``sources``.

    ``train_size``, ``test_size``: num_seqs and seq_len of ``train`` and ``held_out``, by ``seed`` or ``test_seed``.
    """

    name: str
    corpus: str
    train_size: Sequence[int] = ()
    test_size: Sequence[int] = ()
    seed: int = 0
    dtype: str = ""
    device: str = "cpu"
    test_seed: int | None = None
    held_out: str = "test"
    sources: dict = field(default_factory=dict, init=False, compare=False, repr=False)

    def __str__(self):
        return f"{self.name}, seed {self.seed}"

    def changed(self, kind: type["Subject"] | None = None, **changes) -> "Subject":
        """Return a copy with other settings, or of another kind, whose sources are this one's too."""
        kind = kind or type(self)
        same = {each.name for each in dataclasses.fields(kind) if each.init and hasattr(self, each.name)}
        other = kind(**{name: getattr(self, name) for name in same} | changes)
        object.__setattr__(other, "sources", self.sources)
        return other

    def each(self, **choices: list) -> list["Subject"]:
        """Return a copy for every combination of settings: ``each(name=models, seed=seeds)``."""
        combined = itertools.product(*choices.values())
        return [dataclasses.replace(self, **dict(zip(choices, chosen))) for chosen in combined]

    @property
    def model(self):
        """The model."""
        return self._load()[0]

    @property
    def tokenizer(self):
        """Its tokenizer."""
        return self._load()[1]

    @property
    def exact(self) -> ExactPass:
        """What the model itself makes of its texts."""
        return self._load()[2]

    @property
    def about(self) -> dict:
        """``describe`` of the model."""
        return describe(self.model)

    @property
    def train(self) -> torch.Tensor:
        """Tokens (num_seqs, seq_len) for calibration."""
        return self.text("train", self.train_size, self.seed)

    @property
    def test(self) -> torch.Tensor:
        """Held-out tokens (num_seqs, seq_len)."""
        return self.text(self.held_out, self.test_size, self.seed if self.test_seed is None else self.test_seed)

    def text(self, split: str, size: Sequence[int], seed: int, corpus: str = "") -> torch.Tensor:
        """Draw tokens of ``size`` (num_seqs, seq_len) by ``seed`` from a split of its corpus, or of another one."""
        corpus = corpus or self.corpus
        which = {"corpus": corpus, "split": split, "size": size, "seed": seed}
        tokens, source = _text(name=self.name, dtype=self.dtype, device=self.device, **which)
        self.sources[f"corpus {corpus} {split} {size[0]}x{size[1]} seed {seed}"] = source
        return tokens

    def calibrated(self, preset: Preset, batch_size: int = 8) -> Compressor:
        """Fit ``preset`` on the calibration text, of which keys and values are captured once for all presets."""
        preset = preset.fitting(self.model)
        held = _captured(subject=self, batch_size=batch_size, pre_rope=preset.pre_rope)
        return calibrate(self.model, self.train, preset, batch_size, progress=False, captured=held)

    def _load(self):
        *loaded, source = _loaded(name=self.name, dtype=self.dtype, device=self.device)
        self.sources[f"model {self.name}"] = source
        return loaded


@per_process(maxsize=1)
def _loaded(name: str, dtype: str, device: str):
    model, tokenizer = load_model(name, dtype or None, device)
    return model, tokenizer, ExactPass(model, EXACT_BYTES), model_fingerprint(model)


@per_process(maxsize=2)
def _text(name: str, dtype: str, device: str, corpus: str, split: str, size: Sequence[int], seed: int):
    tokenizer = _loaded(name=name, dtype=dtype, device=device)[1]
    tokens = load_corpus(corpus, tokenizer, split, size[1], size[0], seed)
    return tokens, corpus_fingerprint(tokens)


@per_process(maxsize=2)
def _captured(subject: Subject, batch_size: int, pre_rope: int) -> CapturedTokens:
    """Once for each side of RoPE; the files go when it is forgotten."""
    return CapturedTokens(subject.model, subject.train, batch_size, pre_rope, progress=False)
