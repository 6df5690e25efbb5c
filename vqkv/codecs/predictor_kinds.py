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
from vqkv.runtime.checks import FP16_MAX, MAX_SEED, call

MANY = 1 << 20
MLP_WEIGHTS = ("first", "first_bias", "gain", "shift", "second", "second_bias")


@dataclass(eq=False)
class Predictor(Part):
    """x (..., in_features) -> a prediction of y (..., out_features) in float32, from weights as they are stored."""

    learns = True

    def fit(self, samples: Samples) -> "Predictor":
        """Learn from a stream of x (n, in_features), y (n, out_features), and freeze.

        ``samples()`` starts a new pass, each the same; one batch is held at a time. Raises ``DataError`` for weights
        beyond fp16. By default there is nothing to learn."""
        return self

    def lay_out(self, inputs: int, outputs: int) -> None:
        """Make the learned tensors for features of these widths, on the meta device: what they will take."""

    def __call__(self, x: Tensor) -> Tensor:
        with full_precision(x.device):
            return self._predict(x.detach().float())

    @abstractmethod
    def _predict(self, x: Tensor) -> Tensor: ...


def half(name: str, tensor: Tensor) -> Tensor:
    """Round to fp16 as it is stored. Raises ``DataError`` for what fp16 cannot hold."""
    if not tensor.abs().le(FP16_MAX).all():
        largest = float(tensor.abs().max())
        raise DataError(f"the predictor's {name} reaches {largest:g}, beyond fp16: scale x or y, or regularise more")
    return tensor.half().contiguous()


def _empty(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@dataclass(eq=False)
class Linear(Predictor):
    """Ridge regression with a bias in closed form, AQUA-KV's own predictor; fp16 weights. The penalty is ``strength``
    times the mean of the diagonal of X'X. With no inputs it is the mean of y."""

    strength: float = 1e-3
    bias: Tensor = learned()
    weight: Tensor = learned()
    limits = {"strength": (0.0, 1e6)}

    def fit(self, samples: Samples) -> Predictor:
        ridge = Ridge(self.strength)
        for x, y in samples():
            ridge.accumulate(x.detach(), y.detach())
        self.take(ridge, ridge.solve())
        return self

    def take(self, ridge: Ridge, weights: Tensor) -> None:
        """Keep float64 ``weights`` (in_features + 1, out_features), the bias fitted to them as they are stored.

        An input with a large mean would turn their rounding into a shift."""
        mean_x, mean_y = ridge.means()
        self._store(ridge, weights[:-1])
        self.bias = half("bias", mean_y - mean_x @ self._weights(len(mean_x)).double())

    def lay_out(self, inputs: int, outputs: int) -> None:
        self.weight, self.bias = _empty(inputs, outputs), _empty(outputs)

    def _store(self, ridge: Ridge, weights: Tensor) -> None:
        """Keep float64 ``weights`` (in_features, out_features)."""
        self.weight = half("weight", weights)

    def _weights(self, inputs: int) -> Tensor:
        """Return kept weights in float32 (inputs, out_features)."""
        return self.weight.float()

    def _predict(self, x: Tensor) -> Tensor:
        return product(x, self._weights(x.shape[-1])) + self.bias.float()


@dataclass(eq=False)
class ReducedRank(Linear):
    """The ridge regression of rank ``rank``: the full one, projected on the main directions of what it predicts
    (Mukherjee and Zhu 2011). Two fp16 factors, or one matrix where these take more."""

    rank: int = 256
    left: Tensor = learned()
    right: Tensor = learned()
    limits = Linear.limits | {"rank": (1, MANY)}

    def lay_out(self, inputs: int, outputs: int) -> None:
        if self._factored(inputs, outputs):
            self.left, self.right, self.bias = _empty(inputs, self.rank), _empty(self.rank, outputs), _empty(outputs)
        else:
            super().lay_out(inputs, outputs)

    def _store(self, ridge: Ridge, weights: Tensor) -> None:
        # eigh's order is ascending; the penalised X'X makes this exact for the penalised error
        directions = torch.linalg.eigh(weights.T @ ridge.penalized() @ weights).eigenvectors[:, -self.rank :]
        if self._factored(*weights.shape):
            self.left, self.right = half("left factor", weights @ directions), half("right factor", directions.T)
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
class LinearGPTQ(Linear):
    """Ridge regression whose weights GPTQ rounds to ``bits`` bits (Frantar et al. 2022), packed along the inputs of
    each output; every ``group_size`` of them share an fp16 scale and zero."""

    bits: int = 4
    group_size: int = 128
    codes: Tensor = learned()
    scales: Tensor = learned()
    zeros: Tensor = learned()
    limits = Linear.limits | {"bits": (1, 8), "group_size": (1, MANY)}

    def lay_out(self, inputs: int, outputs: int) -> None:
        groups = -(-inputs // self.group_size)
        self.codes = _empty(outputs, -(-inputs * self.bits // 8), dtype=torch.uint8)
        self.scales, self.zeros, self.bias = _empty(groups, outputs), _empty(groups, outputs), _empty(outputs)

    def _store(self, ridge: Ridge, weights: Tensor) -> None:
        # X'X about the mean, since the bias takes up whatever the rounding does to the mean
        codes, self.scales, self.zeros = gptq(weights, ridge.penalized(), self.bits, self.group_size)
        self.codes = pack_codes(codes.T, self.bits)

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

    def fit(self, samples: Samples) -> Predictor:
        trained = train_mlp(samples, self.width, self.epochs, self.learning_rate, self.minibatch, self.seed)
        for name, tensor in zip(MLP_WEIGHTS, trained, strict=True):
            self.register_buffer(name, half(name, tensor))
        return self

    def lay_out(self, inputs: int, outputs: int) -> None:
        hidden = self.width * outputs
        shapes = ((inputs, hidden), (hidden,), (hidden,), (hidden,), (hidden, outputs), (outputs,))
        for name, shape in zip(MLP_WEIGHTS, shapes, strict=True):
            self.register_buffer(name, _empty(*shape))

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

    def _predict(self, x: Tensor) -> Tensor:
        return x[..., self.start : self.start + self.size]


KINDS: dict[str, Callable[..., Predictor]] = {
    "linear": Linear,
    "reduced_rank": ReducedRank,
    "mlp": MLP,
    "gptq": LinearGPTQ,
}


def make_predictor(kind: str, /, **settings) -> Predictor:
    """Make a predictor of ``KINDS`` with its settings. Raises ``UnknownNameError`` for another kind or setting."""
    return call("predictor", KINDS, kind, settings)
