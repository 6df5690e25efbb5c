"""Inter-layer predictors: what one layer's keys and values say about the next one's (AQUA-KV)."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vqkv.codecs.learning.gptq import dequantize, gptq
from vqkv.codecs.learning.mlp import Samples, mlp, train_mlp
from vqkv.codecs.learning.ridge import Ridge
from vqkv.codecs.stage import Part, learned
from vqkv.errors import DataError
from vqkv.kernels import pack_codes, unpack_codes
from vqkv.kernels.precision import by_rows, full_precision, product
from vqkv.runtime.checks import FP16_MAX, MAX_SEED
from vqkv.runtime.registry import call

Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]  # of learned tensors
MANY = 1 << 20
MLP_WEIGHTS = ("first", "first_bias", "gain", "shift", "second", "second_bias")


@dataclass(eq=False)
class Predictor(Part):
    """x (..., in_features) -> a prediction of y (..., out_features) in float32, from weights as they are stored.
    Subclasses write ``layout``, ``_fit`` and ``_predict``."""

    learns = True

    def fit(self, samples: Samples) -> "Predictor":
        """Learn from a stream of x (n, in_features), y (n, out_features), and freeze. ``samples()`` starts a fresh
        pass, each the same; one batch is held at a time. Raises ``DataError`` for weights beyond fp16."""
        self._fit(lambda: ((x.detach().float(), y.detach().float()) for x, y in samples() if len(x)))
        return self

    def __call__(self, x: Tensor) -> Tensor:
        with full_precision(x.device):
            return self._predict(x.detach().float())

    def layout(self, inputs: int, outputs: int) -> Layout:
        """Shape and type of every learned tensor, for features of these widths."""
        return {}

    def keep(self, **tensors: Tensor) -> None:
        """Make what was learned its buffers."""
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def _fit(self, samples: Samples) -> None:
        """Learn; nothing to do by default."""

    @abstractmethod
    def _predict(self, x: Tensor) -> Tensor: ...


def half(name: str, tensor: Tensor) -> Tensor:
    """fp16 as it is stored. Raises ``DataError`` for what fp16 cannot hold."""
    if not tensor.abs().le(FP16_MAX).all():
        largest = float(tensor.abs().max())
        raise DataError(f"the predictor's {name} reaches {largest:g}, beyond fp16: scale x or y, or regularise more")
    return tensor.half().contiguous()


def in_fp16(**shapes: tuple[int, ...]) -> Layout:
    """Lay out tensors that are all fp16."""
    return {name: (shape, torch.float16) for name, shape in shapes.items()}


@dataclass(eq=False)
class Regression(Predictor):
    """Predictors that are solved from streamed sums, with a bias for the rounded weights."""

    strength: float = 1e-3
    bias: Tensor = learned()
    limits = {"strength": (0.0, 1e6)}

    def _fit(self, samples: Samples) -> None:
        ridge = Ridge(self.strength)
        for x, y in samples():
            ridge.accumulate(x, y)
        self.take(ridge, ridge.solve())

    def take(self, ridge: Ridge, weights: Tensor) -> None:
        """Keep float64 ``weights`` (in_features + 1, out_features), the bias fitted to them as they are stored."""
        moments = ridge.moments()
        self._store(ridge, weights[:-1])
        # fitted to the weights as stored: an input with a large mean would turn their rounding into a shift
        self.keep(bias=half("bias", moments.mean_y - moments.mean_x @ self._weights(len(moments.mean_x)).double()))

    def _predict(self, x: Tensor) -> Tensor:
        return product(x, self._weights(x.shape[-1])) + self.bias.float()

    @abstractmethod
    def _store(self, ridge: Ridge, weights: Tensor) -> None:
        """Keep float64 ``weights`` (in_features, out_features)."""

    @abstractmethod
    def _weights(self, inputs: int) -> Tensor:
        """Kept weights in float32 (inputs, out_features)."""


@dataclass(eq=False)
class Linear(Regression):
    """Ridge regression with a bias in closed form, AQUA-KV's own predictor; fp16 weights. The penalty is ``strength``
    times the mean of the diagonal of X'X. With no inputs it is the mean of y."""

    weight: Tensor = learned()

    def layout(self, inputs: int, outputs: int) -> Layout:
        return in_fp16(weight=(inputs, outputs), bias=(outputs,))

    def _store(self, ridge: Ridge, weights: Tensor) -> None:
        self.keep(weight=half("weight", weights))

    def _weights(self, inputs: int) -> Tensor:
        return self.weight.float()


@dataclass(eq=False)
class ReducedRank(Linear):
    """The ridge regression of rank ``rank``: the full one, projected on the main directions of what it predicts
    (Mukherjee and Zhu 2011). Two fp16 factors, or one matrix where these take more."""

    rank: int = 256
    left: Tensor = learned()
    right: Tensor = learned()
    limits = Linear.limits | {"rank": (1, MANY)}

    def layout(self, inputs: int, outputs: int) -> Layout:
        if not self._factored(inputs, outputs):
            return super().layout(inputs, outputs)
        return in_fp16(left=(inputs, self.rank), right=(self.rank, outputs), bias=(outputs,))

    def _store(self, ridge: Ridge, weights: Tensor) -> None:
        # eigh's order is ascending; the penalised X'X makes this exact for the penalised error
        directions = torch.linalg.eigh(weights.T @ ridge.penalized() @ weights).eigenvectors[:, -self.rank :]
        if self._factored(*weights.shape):
            self.keep(left=half("left factor", weights @ directions), right=half("right factor", directions.T))
        else:
            super()._store(ridge, weights @ directions @ directions.T)

    def _weights(self, inputs: int) -> Tensor:
        return super()._weights(inputs) if self.left is None else self.left.float() @ self.right.float()

    def _predict(self, x: Tensor) -> Tensor:
        if self.left is None:
            return super()._predict(x)
        return product(product(x, self.left.float()), self.right.float()) + self.bias.float()

    def _factored(self, inputs: int, outputs: int) -> bool:
        return self.rank * (inputs + outputs) < inputs * outputs


@dataclass(eq=False)
class LinearGPTQ(Regression):
    """Ridge regression whose weights GPTQ rounds to ``bits`` bits (Frantar et al. 2022), packed along the inputs of
    each output; every ``group_size`` of them share an fp16 scale and zero."""

    bits: int = 4
    group_size: int = 128
    codes: Tensor = learned()
    scales: Tensor = learned()
    zeros: Tensor = learned()
    limits = Regression.limits | {"bits": (1, 8), "group_size": (1, MANY)}

    def layout(self, inputs: int, outputs: int) -> Layout:
        grid, codes = (-(-inputs // self.group_size), outputs), (outputs, -(-inputs * self.bits // 8))
        return {"codes": (codes, torch.uint8)} | in_fp16(scales=grid, zeros=grid, bias=(outputs,))

    def _store(self, ridge: Ridge, weights: Tensor) -> None:
        # X'X about the mean, since the bias takes up whatever the rounding does to the mean
        codes, scales, zeros = gptq(weights, ridge.penalized(), self.bits, self.group_size)
        self.keep(codes=pack_codes(codes.T, self.bits), scales=scales, zeros=zeros)

    def _weights(self, inputs: int) -> Tensor:
        codes = unpack_codes(self.codes, self.bits, inputs).T
        return dequantize(codes, self.scales, self.zeros, self.group_size)


@dataclass(eq=False)
class MLP(Predictor):
    """Two layers with LayerNorm and GELU between, ``width`` times ``out_features`` hidden; fp16 weights (AQUA-KV's
    ablation). Trained by ``vqkv.codecs.learning.mlp``, which passes over the samples ``epochs`` + 1 times."""

    width: int = 2
    epochs: int = 10
    learning_rate: float = 5e-3
    minibatch: int = 256
    seed: int = 0
    limits = {"width": (1, 64), "epochs": (1, 10_000), "minibatch": (1, MANY), "seed": (0, MAX_SEED),
              "learning_rate": (0.0, 1.0)}  # fmt: skip

    def layout(self, inputs: int, outputs: int) -> Layout:
        """The first layer, LayerNorm's gain and shift, the second layer."""
        hidden = self.width * outputs
        shapes = ((inputs, hidden), (hidden,), (hidden,), (hidden,), (hidden, outputs), (outputs,))
        return in_fp16(**dict(zip(MLP_WEIGHTS, shapes, strict=True)))

    def _fit(self, samples: Samples) -> None:
        trained = train_mlp(samples, self.width, self.epochs, self.learning_rate, self.minibatch, self.seed)
        self.keep(**{name: half(name, tensor) for name, tensor in zip(MLP_WEIGHTS, trained, strict=True)})

    def _predict(self, x: Tensor) -> Tensor:
        weights = [getattr(self, name).float() for name in MLP_WEIGHTS]
        return by_rows(lambda rows: mlp(rows, weights), x.flatten(0, -2)).view(*x.shape[:-1], len(weights[-1]))


@dataclass(eq=False)
class Copy(Predictor):
    """y as x is: whole-layer sharing."""

    learns = False

    def _predict(self, x: Tensor) -> Tensor:
        return x


@dataclass(eq=False)
class Slice(Predictor):
    """So many features of x, from the ``start``-th on: a layer's own, of those that are stored together."""

    start: int = 0
    size: int = 1
    learns = False
    limits = {"start": (0, MANY), "size": (1, MANY)}

    def _predict(self, x: Tensor) -> Tensor:
        return x[..., self.start : self.start + self.size]


KINDS: dict[str, Callable[..., Predictor]] = {
    "linear": Linear,
    "reduced_rank": ReducedRank,
    "mlp": MLP,
    "gptq": LinearGPTQ,
}


def make_predictor(kind: str, /, **settings) -> Predictor:
    """A predictor of ``KINDS`` with its settings. Raises ``UnknownNameError`` for another kind or setting."""
    return call("predictor", KINDS, kind, settings)
