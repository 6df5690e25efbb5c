"""Inter-layer predictors: a stream to learn from, input checks, weights as they are stored."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vqkv.codecs.part import Layout, Part
from vqkv.errors import DataError
from vqkv.kernels.precision import full_precision
from vqkv.runtime.checks import FP16_MAX, check_whole

Samples = Callable[[], Iterator[tuple[Tensor, Tensor]]]  # a fresh pass over (x, y) batches, each call the same
MAX_FEATURES = 1 << 20


@dataclass(eq=False, kw_only=True)
class Predictor(Part):
    """x (..., in_features) -> a prediction of y (..., out_features) in float32, from weights as they are stored.

    Subclasses write ``layout``, ``_fit`` and ``_predict``; the widths are set by ``fit``. Checks are made here, once.
    """

    in_features: int | None = None
    out_features: int | None = None
    ready = False

    def __post_init__(self):
        for name, least in (("in_features", 0), ("out_features", 1)):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), least, MAX_FEATURES)

    def fit(self, samples: Samples) -> "Predictor":
        """Learn from a stream of x (n, in_features), y (n, out_features), and freeze in the precision it is stored in.

        ``samples()`` starts a fresh pass, each the same; one batch is held at a time. Raises ``DataError`` for no
        samples, NaN or infinity, widths that do not fit, and weights beyond fp16.
        """
        if self.ready:
            raise RuntimeError(f"this {type(self).__name__} is frozen: make a new one to learn again")
        self._fit(lambda: self._checked(samples))
        self.ready = True
        return self

    def __call__(self, x: Tensor) -> Tensor:
        """Raises ``RuntimeError`` before ``fit``."""
        if not self.ready:
            raise RuntimeError(f"this {type(self).__name__} is not fitted: call fit(samples) first")
        with full_precision(x.device):
            return self._predict(x.detach().float())

    @abstractmethod
    def layout(self) -> Layout:
        """Shape and type of every learned tensor, once the widths are known."""

    def keep(self, **tensors: Tensor) -> None:
        """Make what was learned its buffers."""
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    @abstractmethod
    def _fit(self, samples: Samples) -> None: ...

    @abstractmethod
    def _predict(self, x: Tensor) -> Tensor: ...

    def _checked(self, samples: Samples) -> Iterator[tuple[Tensor, Tensor]]:
        """A pass over ``samples`` in float32; the first batch sets the widths that are not set yet."""
        count = 0
        for x, y in samples():
            self._check(x, y)
            count += len(x)
            if len(x):
                yield x.detach().float(), y.detach().float()
        if not count:
            raise DataError("no samples to fit a predictor on: give at least one batch (x, y)")

    def _check(self, x: Tensor, y: Tensor) -> None:
        for name, tensor, features in (("x", x, "in_features"), ("y", y, "out_features")):
            if getattr(self, features) is None:
                setattr(self, features, tensor.shape[1])
            if tensor.shape[1] != getattr(self, features):
                raise DataError(f"samples: {name} is {tensor.shape[1]} wide, not {features} {getattr(self, features)}")
            if bad := int((~torch.isfinite(tensor)).sum()):
                raise DataError(f"samples: {bad} of {tensor.numel()} values of {name} are NaN or infinite")


def half(name: str, tensor: Tensor) -> Tensor:
    """fp16 as it is stored. Raises ``DataError`` for what fp16 cannot hold."""
    if not tensor.abs().le(FP16_MAX).all():
        largest = float(tensor.abs().max())
        raise DataError(f"the predictor's {name} reaches {largest:g}, beyond fp16: scale x or y, or regularise more")
    return tensor.half().contiguous()


def check_real(name: str, value, least: float, most: float) -> None:
    """Raise ``DataError`` unless ``value``, a setting called ``name``, is a number from ``least`` to ``most``."""
    if type(value) not in (int, float) or not least <= value <= most:
        raise DataError(f"{name} {value!r} must be a number from {least:g} to {most:g}")
