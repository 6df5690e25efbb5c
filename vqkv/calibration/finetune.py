"""Light fine-tuning: the attention blocks learn to read a quantized cache while its codebooks go on learning.

Source: the residual VQ paper (Kumar, "Residual vector quantization for KV cache compression in large language model"),
sections 3 and 3.1: all weights of the attention blocks are trained together with the quantizer, at a constant learning
rate of 1e-5 and 50,000 tokens a step, with a straight-through gradient and no commitment loss.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F
from tqdm import tqdm

from vqkv.cache.compressor import Compressor
from vqkv.cache.settings import CacheSettings
from vqkv.codecs.pipeline import Codec
from vqkv.codecs.predictive import ROLES, LayerRole
from vqkv.errors import DataError
from vqkv.models.capture import capture, check_tokens
from vqkv.models.layers import InterceptingCache, kv_layers, plain
from vqkv.models.load import describe
from vqkv.models.rope import Rotation, rotations
from vqkv.presets import Preset
from vqkv.runtime.checks import check_whole

REMEDY = "If the model's weights and dtype are sound, use a smaller lr, or in fp16 a smaller micro_batch"


@dataclass(frozen=True)
class FineTuned:
    """``compressor``: fitted to the fine-tuned model; None without a preset. ``losses``: mean cross-entropy in nats a
    token of every step's batch, before that step, reading quantized keys and values where there is a preset."""

    compressor: Compressor | None
    losses: tuple[float, ...]


def finetune(
    model,
    tokens: Tensor,
    preset: Preset | None,
    lr: float = 1e-5,
    batch_size: int = 8,
    micro_batch: int | None = None,
    progress: bool = True,
) -> FineTuned:
    """Train all weights of ``model``'s attention blocks, **in place**, to read keys and values through ``preset``'s
    codecs on ``tokens`` (num_seqs, seq_len), and fit the codecs meanwhile. ``copy.deepcopy`` a model to keep it.

    The first batch of ``batch_size`` sequences initialises the codebooks as ``calibrate`` does. Every further batch is
    one step of AdamW (constant ``lr``, no weight decay, no dropout) on the next-token cross-entropy, then one
    moving-average step of every codec. Every token but the preset's ``sink_tokens`` is read back, as under
    ``in_place``, with no recent window. Without a preset the same steps are made without quantization: the control, to
    be calibrated afterwards.

    ``micro_batch``: sequences that go through the model at a time; their gradients add up to the batch's. A model in 16
    bits keeps the trained weights in fp32 meanwhile and computes under autocast.

    Raises ``DataError`` for arguments out of range, a preset with blocks of tokens or predictors, or a loss or gradient
    that is not finite, naming the step. After an error or an interruption the model is as it was before.
    """
    model = plain(model)
    _check(model, tokens, preset, lr, batch_size, micro_batch)
    preset = preset.fitting(model) if preset else None
    (first, *batches), about = tokens.split(batch_size), describe(model)
    micro_batch, losses, pairs = micro_batch or batch_size, list[float](), []
    if preset is not None:
        pairs = [(preset.key_codec(key_dim), preset.value_codec(dim)) for _, key_dim, dim in about["shapes"]]
    reading = StraightThrough(model, pairs, preset.settings if preset else CacheSettings(pre_rope=False))
    half = next((weight.dtype for weight in attention_weights(model) if weight.dtype.itemsize == 2), None)
    autocast = partial(torch.autocast, model.device.type, dtype=half) if half else nullcontext
    with torch.inference_mode(False), torch.enable_grad(), training(model) as weights:
        with autocast():
            reading.start(first, micro_batch)
        optimizer = torch.optim.AdamW(weights, lr=lr, weight_decay=0.0)
        bar = tqdm(batches, desc="fine-tune", unit="step", disable=None if progress else True)
        for number, batch in enumerate(bar, 1):
            try:
                losses.append(_gradients(reading, weights, batch.split(micro_batch), autocast))
                optimizer.step()
                optimizer.zero_grad()
                reading.learn()
            except DataError as error:
                raise DataError(f"step {number} of fine-tuning: {error}. {REMEDY}") from error
            bar.set_postfix(loss=f"{losses[-1]:.3f}")
        for codec in chain(*pairs):
            codec.finalize()
    model.vqkv_name = f"{about['name']} fine-tuned"
    if preset is None:
        return FineTuned(None, tuple(losses))
    notes = {"arguments": preset.arguments, "tokens": tokens.numel(), "batch_size": batch_size}
    notes["finetune"] = {"lr": lr, "steps": len(losses)}
    return FineTuned(Compressor(preset.name, pairs, preset.settings, describe(model), notes), tuple(losses))


def attention_weights(model) -> list[Parameter]:
    """List all weights of the attention blocks, norms included."""
    return [*dict.fromkeys(weight for layer in kv_layers(model) for weight in layer.attention.parameters())]


@contextmanager
def training(model) -> Iterator[list[Parameter]]:
    """Train a model's attention weights, in fp32, and nothing else; afterwards they are rounded to their dtype. After
    an error or an interruption they are as before."""
    weights = attention_weights(model)
    before = [weight.data for weight in weights]
    needing = [weight for weight in model.parameters() if weight.requires_grad]
    modes = [module for module in model.modules() if module.training]
    model.eval().requires_grad_(False)
    try:
        for weight in weights:
            weight.data = weight.data.to(torch.float32, copy=True)
            weight.requires_grad_()
        yield weights
        before = [weight.data.to(old.dtype) for weight, old in zip(weights, before, strict=True)]
    finally:
        for weight, data in zip(weights, before, strict=True):
            weight.grad, weight.data = None, data
        model.requires_grad_(False)
        for weight in needing:
            weight.requires_grad_()
        for module in modes:
            module.training = True


class StraightThrough:
    """A model that reads its keys and values through codecs, in the state these are in, but for the sinks.

    Gradients pass as if nothing had happened (van den Oord et al. 2017). ``pairs``: (key codec, value codec) of every
    layer, or none at all."""

    def __init__(self, model, pairs: list[tuple[Codec, Codec]], settings: CacheSettings):
        self.model, self.settings = model, settings
        self.codecs: dict[LayerRole, Codec] = {
            (role, layer): codec for layer, pair in enumerate(pairs) for role, codec in zip(ROLES, pair, strict=True)
        }
        self.rotations = rotations(model, settings.pre_rope) if settings.pre_rope else None
        self.passes: list[dict[LayerRole, Tensor]] = []  # exact keys and values since the last learning step

    def start(self, tokens: Tensor, batch_size: int) -> None:
        """Initialize codecs that learn by tokens (num_seqs, seq_len), ``batch_size`` sequences at a time."""
        if learning := [layer_role for layer_role, codec in self.codecs.items() if not codec.ready]:
            captured = dict(zip(ROLES, capture(self.model, tokens, batch_size, self.settings.pre_rope), strict=True))
            for role, layer in learning:
                self.codecs[role, layer].partial_fit(captured[role][layer])

    def logits(self, tokens: Tensor) -> Tensor:
        """Compute the logits of tokens (batch, seq_len), and keep exact keys and values for ``learn``."""
        exact: dict[LayerRole, Tensor] = {}
        self.passes.append(exact)
        cache = InterceptingCache(self.model, partial(self._read, exact))
        return self.model(tokens.to(self.model.device), past_key_values=cache, use_cache=True).logits

    def learn(self) -> None:
        """Make one learning step of every codec that learns, on all that was read since the last one."""
        for layer_role, codec in self.codecs.items():
            if codec.learns and not codec.ready:
                codec.partial_fit(torch.cat([exact[layer_role] for exact in self.passes]))
        self.passes.clear()

    def _read(self, exact: dict[LayerRole, Tensor], layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        keys = self._through(exact, ("key", layer), keys, self.rotations[layer] if self.rotations else None)
        return keys, self._through(exact, ("value", layer), values, None)

    def _through(
        self, exact: dict[LayerRole, Tensor], layer_role: LayerRole, x: Tensor, rotation: Rotation | None
    ) -> Tensor:
        if layer_role not in self.codecs:
            return x
        with torch.no_grad():
            stored = x.detach() if rotation is None else rotation.rotated(x.detach().float(), back=True).to(x)
            exact[layer_role] = stored
            read = self.codecs[layer_role].quantize_dequantize(stored)
            read[:, :, : self.settings.sink_tokens] = stored[:, :, : self.settings.sink_tokens]
            read = read if rotation is None else rotation.rotated(read.float())
        return (x.float() + (read - x.float()).detach()).to(x.dtype)


def _gradients(reading: StraightThrough, weights: list[Parameter], parts: tuple[Tensor, ...], autocast) -> float:
    """Leave the mean loss's gradient, return the loss. Sums go backward: in fp16 one token's share would vanish."""
    total, count = 0.0, sum(part[:, 1:].numel() for part in parts)
    for part in parts:
        with autocast():
            logits = reading.logits(part)[:, :-1]
        targets = part[:, 1:].flatten().to(logits.device)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets, reduction="sum")
        loss.backward()
        total += loss.item()
    gradients = [weight.grad for weight in weights if weight.grad is not None]  # a model may use some weights only
    for gradient in gradients:
        gradient /= count
    size = torch.nn.utils.get_total_norm(gradients)
    if not (math.isfinite(total) and size.isfinite()):
        raise DataError(f"loss {total / count} and gradient {size.item()}: not finite")
    return total / count


def _check(model, tokens, preset, lr, batch_size, micro_batch) -> None:
    check_tokens(model, tokens)
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        raise DataError("some weights are not in memory: fine-tune on one device, or a device map without offloading")
    for count in (batch_size, micro_batch or 1):
        check_whole("batch_size", count, 1)
    if not 0 < lr <= 1:
        raise DataError(f"lr {lr!r} must be a number above 0, and at most 1")
    if tokens.shape[1] < 2 or len(tokens) <= batch_size:
        raise DataError(
            f"tokens {tuple(tokens.shape)} in batches of {batch_size}: fine-tuning needs sequences of 2 tokens or "
            "more, and a second batch, as the first one initialises the codebooks"
        )
    if preset is None:
        return
    blocks = any(make(None).block_tokens > 1 for make in (preset.key_codec, preset.value_codec))
    if blocks or preset.plan is not None:
        why = "it packs blocks of tokens, whose first is read before the last one is known"
        why = why if blocks else "its layers are predicted from others"
        raise DataError(f"cannot fine-tune with preset {preset.name!r}: {why}. vqllm and higgs can be trained with")
