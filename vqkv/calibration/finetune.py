"""Light fine-tuning: the attention blocks learn to read a quantized cache while its codebooks go on learning.

Source: the residual VQ paper (Kumar, "Residual vector quantization for KV cache compression in large language model"),
sections 3 and 3.1: all weights of the attention blocks are trained together with the quantizer, at a constant learning
rate of 1e-5 and 50,000 tokens a step, with a straight-through gradient and no commitment loss.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from vqkv.cache.compressor import Compressor
from vqkv.calibration.straight_through import StraightThrough
from vqkv.calibration.trained_weights import TrainedWeights, recomputing
from vqkv.codecs.predictive import ROLES
from vqkv.errors import DataError
from vqkv.models.capture import capture, check_batch_size, check_tokens
from vqkv.models.load import describe
from vqkv.models.plain import plain
from vqkv.models.rope import rotations
from vqkv.presets import Preset
from vqkv.runtime.checks import check_whole

MOST = 1 << 30
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
    gradient_checkpointing: bool = False,
    progress: bool = True,
) -> FineTuned:
    """Train all weights of ``model``'s attention blocks, **in place**, to read keys and values through ``preset``'s
    codecs on ``tokens`` (num_seqs, seq_len), and fit the codecs meanwhile. ``copy.deepcopy`` a model to keep it.

    The first batch of ``batch_size`` sequences initialises the codebooks as ``calibrate`` does. Every further batch is
    one step of AdamW (constant ``lr``, no weight decay, no dropout) on the next-token cross-entropy, then one
    moving-average step of every codec. Every token but the preset's ``sink_tokens`` is read back, as under
    ``in_place``, with no recent window. Without a preset the same steps are made without quantization: the control, to
    be calibrated afterwards.

    ``micro_batch``: sequences that go through the model at a time; their gradients add up to the batch's.
    ``gradient_checkpointing``: layers are computed again in the backward pass. A model in 16 bits keeps the trained
    weights in fp32 meanwhile and computes under autocast.

    Raises ``DataError`` for arguments out of range, a preset with blocks of tokens or predictors, or a loss or gradient
    that is not finite, naming the step. After an error or an interruption the model is as it was before.
    """
    model = plain(model)
    _check(model, tokens, preset, lr, batch_size, micro_batch)
    preset = preset.fitting(model) if preset else None
    batches, about = tokens.split(batch_size), describe(model)
    micro_batch = micro_batch or batch_size
    places = [(role, layer) for layer in range(about["num_layers"]) for role in ROLES] if preset else []
    make = {"key": lambda i: preset.key_codec(about["shapes"][i][1])}
    make["value"] = lambda i: preset.value_codec(about["shapes"][i][2])
    codecs = {(role, layer): make[role](layer) for role, layer in places}
    turns = rotations(model, preset.pre_rope) if preset and preset.pre_rope else [None] * about["num_layers"]
    reading = StraightThrough(codecs, turns, preset.sink_tokens if preset else 0)
    with torch.inference_mode(False), torch.enable_grad(), TrainedWeights(model) as weights:
        run = _Run(model, weights, reading, lr, micro_batch)
        if codecs:
            run.start(batches[0])
        with recomputing(model) if gradient_checkpointing else nullcontext():
            run.train(batches[1:], progress)
        for codec in codecs.values():
            codec.finalize()
        weights.keep()
    model.vqkv_name = f"{about['name']} fine-tuned"
    if preset is None:
        return FineTuned(None, tuple(run.losses))
    notes = {"arguments": preset.arguments, "tokens": tokens.numel(), "batch_size": batch_size}
    notes["finetune"] = {"lr": lr, "steps": len(run.losses)}
    pairs = [tuple(codecs[role, layer] for role in ROLES) for layer in range(about["num_layers"])]
    return FineTuned(Compressor(preset.name, pairs, preset.settings, describe(model), notes), tuple(run.losses))


class _Run:
    """The training itself: what it changes, and where it is."""

    def __init__(self, model, weights: TrainedWeights, reading: StraightThrough, lr, micro_batch):
        self.model, self.weights, self.reading, self.micro_batch = model, weights, reading, micro_batch
        self.optimizer = torch.optim.AdamW(weights, lr=lr, weight_decay=0.0)
        dtypes = {weight.dtype for weight in weights.before}
        self.half = next((dtype for dtype in dtypes if dtype.itemsize == 2), None)
        self.losses: list[float] = []

    def start(self, batch: Tensor) -> None:
        """Initialise the codebooks on the first batch."""
        with self._autocast():
            pre_rope = next((turn.block for turn in self.reading.turns if turn), False)
            captured = capture(self.model, batch, self.micro_batch, pre_rope)
            found = dict(zip(ROLES, captured, strict=True))
        for (role, layer), codec in self.reading.codecs.items():
            if not codec.ready:
                codec.partial_fit(found[role][layer])

    def train(self, batches: tuple[Tensor, ...], progress: bool) -> None:
        """One step for each batch."""
        bar = tqdm(batches, desc="fine-tune", unit="step", disable=None if progress else True)
        with bar:
            for number, batch in enumerate(bar, 1):
                try:
                    self.losses.append(self._step(batch))
                except DataError as error:
                    raise DataError(f"step {number} of fine-tuning: {error}. {REMEDY}") from error
                bar.set_postfix(loss=f"{self.losses[-1]:.3f}")

    def _step(self, batch: Tensor) -> float:
        loss = self._gradients(batch)
        size = torch.nn.utils.get_total_norm(weight.grad for weight in self._used)
        if not (math.isfinite(loss) and size.isfinite()):
            raise DataError(f"loss {loss} and gradient {size.item()}: not finite")
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.reading.learn()
        return loss

    def _gradients(self, batch: Tensor) -> float:
        """Leave the mean loss's gradient, return the loss. Sums go backward: in fp16 one token's share would vanish."""
        total, count = 0.0, batch[:, 1:].numel()
        for part in batch.split(self.micro_batch):
            part = part.to(self.model.device)
            with self._autocast(), self.reading.record():
                logits = self.model(part, past_key_values=self.reading.cache(self.model), use_cache=True).logits[:, :-1]
            targets = part[:, 1:].flatten().to(logits.device)
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets, reduction="sum")
            loss.backward()
            total = total + loss.detach().double()
        for weight in self._used:
            weight.grad /= count
        return (total / count).item()

    @property
    def _used(self) -> list[Tensor]:
        """Weights that have a gradient; a model may have some that it does not use."""
        return [weight for weight in self.weights if weight.grad is not None]

    def _autocast(self):
        return nullcontext() if self.half is None else torch.autocast(self.model.device.type, dtype=self.half)


def _check(model, tokens, preset, lr, batch_size, micro_batch) -> None:
    check_tokens(model, tokens)
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        raise DataError("some weights are not in memory: fine-tune on one device, or a device map without offloading")
    check_batch_size(batch_size)
    if micro_batch is not None:
        check_whole("micro_batch", micro_batch, 1, MOST)
    if isinstance(lr, bool) or not isinstance(lr, int | float) or not 0 < lr <= 1:
        raise DataError(f"lr {lr!r} must be a number above 0, and at most 1")
    if tokens.shape[1] < 2 or len(tokens) <= batch_size:
        raise DataError(
            f"tokens {tuple(tokens.shape)} in batches of {batch_size}: fine-tuning needs sequences of 2 tokens or "
            "more, and a second batch, as the first one initialises the codebooks"
        )
    if preset is not None:
        _check_preset(preset)


def _check_preset(preset: Preset) -> None:
    """Raise ``DataError`` for what cannot be read back token by token where keys and values are made."""
    if not isinstance(preset, Preset):
        raise DataError(f"preset must be a Preset such as presets.vqllm(), or None, not {type(preset).__name__}")
    reason = None
    if preset.plan is not None:
        reason = "its layers are predicted from others"
    elif any(codec.tokens_per_row > 1 for codec in (preset.key_codec(), preset.value_codec())):
        reason = "it packs blocks of tokens, so that a token would be read before the rest of its block is known"
    if reason:
        raise DataError(f"cannot fine-tune with preset {preset.name!r}: {reason}. vqllm and higgs can be trained with")
