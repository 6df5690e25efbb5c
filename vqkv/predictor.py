"""What every inter-layer predictor shares: a stream to learn from, input checks, state as it is stored."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vqkv.codec.checks import FP16_MAX, check_whole
from vqkv.codec.part import Part, take
from vqkv.errors import DataError, FormatError
from vqkv.precision import full_precision

Samples = Callable[[], Iterator[tuple[Tensor, Tensor]]]  # a fresh pass over (x, y) batches, each call the same
Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]
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
        if not callable(samples):
            raise DataError("samples must be a function that starts a pass: lambda: iter(batches), not the batches")
        self._fit(lambda: self._checked(samples))
        self.ready = True
        return self

    def __call__(self, x: Tensor) -> Tensor:
        """Raises ``DataError`` for x of another width or no floating type, ``RuntimeError`` before ``fit``."""
        if not self.ready:
            raise RuntimeError(f"this {type(self).__name__} is not fitted: call fit(samples) first")
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim == 0 or x.shape[-1] != self.in_features:
            raise DataError(f"x must be a floating tensor (..., {self.in_features}), as in fit; got {_shape(x)}")
        with full_precision(x.device):
            return self._predict(x.detach().float())

    @property
    def side_bytes(self) -> int:
        """Bytes of everything that was learned."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.state().values())

    def state(self) -> dict[str, Tensor]:
        """What was learned, by name; empty before ``fit``."""
        return {name: getattr(self, name) for name in self.layout()} if self.ready else {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Raises ``FormatError`` unless ``state`` holds finite tensors of just the shapes and types of ``layout``."""
        if self.in_features is None or self.out_features is None:
            raise FormatError(f"{type(self).__name__} without in_features and out_features: the file was altered")
        state = dict(state)
        for name, (shape, dtype) in self.layout().items():
            setattr(self, name, take(state, name, shape, dtype))
        super().load_state(state)
        self.ready = True

    @abstractmethod
    def layout(self) -> Layout:
        """Shape and type of every tensor of ``state``, once the widths are known."""

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
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.ndim != 2:
                raise DataError(f"samples: {name} must be a floating tensor (n, {features}), got {_shape(tensor)}")
            if getattr(self, features) is None:
                setattr(self, features, tensor.shape[1])
                Predictor.__post_init__(self)
            if tensor.shape[1] != getattr(self, features):
                raise DataError(f"samples: {name} is {tensor.shape[1]} wide, not {features} {getattr(self, features)}")
            if bad := int((~torch.isfinite(tensor)).sum()):
                raise DataError(f"samples: {bad} of {tensor.numel()} values of {name} are NaN or infinite")
        if len(x) != len(y):
            raise DataError(f"samples: a batch has {len(x)} rows of x, but {len(y)} of y: give one y for each x")


def _shape(x) -> str:
    return f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__


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
