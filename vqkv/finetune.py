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

from vqkv.capture import capture, check_batch_size, check_rope, check_tokens
from vqkv.checkpoint import Checkpoint
from vqkv.codec.base import Codec
from vqkv.codec.checks import check_whole
from vqkv.codec.learning import collected, hand_out
from vqkv.coder import ROLES, Place
from vqkv.compressor import Compressor
from vqkv.corpus import fingerprint
from vqkv.errors import DataError
from vqkv.files import claim
from vqkv.models import describe, layer_devices, weights_fingerprint
from vqkv.presets import Preset
from vqkv.processes import current
from vqkv.settings import CacheSettings
from vqkv.straight_through import StraightThrough
from vqkv.trained_weights import TrainedWeights, recomputing

STEP, MOST = "finetune", 1 << 30
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
    checkpoint=None,
    checkpoint_every: int = 1,
    progress: bool = True,
) -> FineTuned:
    """Train all weights of ``model``'s attention blocks, **in place**, to read keys and values through ``preset``'s
    codecs on ``tokens`` (num_seqs, seq_len), and fit the codecs meanwhile. ``copy.deepcopy`` a model to keep it.

    The first batch of ``batch_size`` sequences initialises the codebooks as ``calibrate`` does. Every further batch is
    one step of AdamW (constant ``lr``, no weight decay, no dropout) on the next-token cross-entropy, then one
    moving-average step of every codec on that batch's keys and values. Every token but the preset's ``sink_tokens`` is
    read back, as under the ``in_place`` protocol, with no recent window. Without a preset the same steps are made
    without quantization: the control, to be calibrated afterwards.

    ``micro_batch``: sequences that go through the model at a time; their gradients add up to the batch's.
    ``gradient_checkpointing``: layers are computed again in the backward pass instead of keeping their activations. A
    model in 16 bits keeps the trained weights in fp32 meanwhile and computes under autocast.

    ``checkpoint``: a folder that keeps all that matters after every ``checkpoint_every`` steps. Called again with the
    same arguments and the original model, a run that was killed goes on from there and ends with the same bits; one
    that had ended is only read back. The folder is the caller's to delete.

    Within ``processes.launched()`` every process calls this with the same arguments, works on its share of each batch
    and ends with the same weights. Raises ``DataError`` for arguments out of range, a preset that cannot be trained
    with (blocks of tokens, predictors, keys after RoPE), or a loss or gradient that is not finite, naming the step;
    ``FormatError`` for a checkpoint of another job. After an error or an interruption the model is as it was before.
    """
    _check(model, tokens, preset, lr, batch_size, micro_batch, checkpoint_every)
    batches, about = tokens.split(batch_size), describe(model)
    micro_batch = micro_batch or batch_size
    codecs = _codecs(preset, about)
    opened = nullcontext()
    if checkpoint is not None:
        job = _job(model, tokens, preset, codecs, lr, batch_size, micro_batch)
        opened = Checkpoint(checkpoint, job).alone()
    reading = StraightThrough(codecs, preset.sink_tokens if preset else 0)
    with opened as steps, torch.inference_mode(False), torch.enable_grad(), TrainedWeights(model) as weights:
        run = _Run(model, weights, reading, lr, micro_batch, steps)
        if run.resume() is None:
            run.start(batches[0])
        with recomputing(model) if gradient_checkpointing else nullcontext():
            run.train(batches[1:], checkpoint_every, progress and current().first)
        for codec in codecs.values():
            codec.finalize()
        weights.keep()
    model.vqkv_name = f"{about['name']} fine-tuned"
    notes = {"tokens": tokens.numel(), "batch_size": batch_size, "finetune": {"lr": lr, "steps": len(run.losses)}}
    return FineTuned(_compressor(model, preset, codecs, notes), tuple(run.losses))


class _Run:
    """The training itself: what it changes, and where it is."""

    def __init__(self, model, weights: TrainedWeights, reading: StraightThrough, lr, micro_batch, steps):
        self.model, self.weights, self.reading = model, weights, reading
        self.micro_batch, self.steps = micro_batch, steps
        self.optimizer = torch.optim.AdamW(weights, lr=lr, weight_decay=0.0)
        dtypes = {weight.dtype for weight in weights.before}
        self.half = next((dtype for dtype in dtypes if dtype.itemsize == 2), None)
        self.losses: list[float] = []

    def start(self, batch: Tensor) -> None:
        """Initialise the codebooks on the first batch."""
        if self.reading.codecs:
            with self._autocast():
                keys, values = capture(self.model, current().share(batch), self.micro_batch)
            for role, layers in zip(ROLES, (keys, values), strict=True):
                for layer, x in enumerate(layers):
                    codec = self.reading.codecs[role, layer]
                    if not codec.ready:
                        codec.partial_fit(x)
        self.save()

    def train(self, batches: tuple[Tensor, ...], every: int, progress: bool) -> None:
        """One step for each batch that is not yet done."""
        bar = tqdm(total=len(batches), initial=len(self.losses), desc="fine-tune", unit="step",
                   disable=None if progress else True)  # fmt: skip
        with bar, self.reading.reading(self.model):
            for number, batch in enumerate(batches[len(self.losses) :], len(self.losses) + 1):
                try:
                    self.losses.append(self._step(batch))
                except DataError as error:
                    raise DataError(f"step {number} of fine-tuning: {error}. {REMEDY}") from error
                bar.set_postfix(loss=f"{self.losses[-1]:.3f}")
                bar.update()
                if number % every == 0 or number == len(batches):
                    self.save()

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
        """Leave the gradient of the mean loss at the weights; returns that loss. Sums go backward, not means: in fp16
        the gradient of one token's share in a large batch would vanish."""
        total, count = 0.0, batch[:, 1:].numel()
        for part in current().share(batch).split(self.micro_batch):
            part = part.to(self.model.device)
            with self._autocast(), self.reading.record():
                logits = self.model(part, use_cache=False).logits[:, :-1]
            targets = part[:, 1:].flatten().to(logits.device)
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets, reduction="sum")
            loss.backward()
            total = total + loss.detach().double()
        for weight in self._used:
            weight.grad = current().total(weight.grad) / count
        return (current().total(total) / count).item()

    @property
    def _used(self) -> list[Tensor]:
        """Weights that have a gradient; a model may have some that it does not use."""
        return [weight for weight in self.weights if weight.grad is not None]

    def _autocast(self):
        return nullcontext() if self.half is None else torch.autocast(self.model.device.type, dtype=self.half)

    def save(self) -> None:
        """Keep all that further steps depend on."""
        if self.steps is None or not current().first:
            return
        tensors = {f"weights.{i}": weight for i, weight in enumerate(self.weights)}
        for i, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{i}.{name}": tensor for name, tensor in state.items()}
        self.steps.save(STEP, tensors | collected(self._named_codecs()), losses=self.losses)

    def resume(self) -> list[float] | None:
        """Be where ``save`` was called last; None if it never was."""
        if self.steps is None or (found := self.steps.load_together(STEP)) is None:
            return None
        tensors, self.losses = found[0], found[1]["losses"]
        state = {}
        for i, weight in enumerate(self.weights):
            weight.data.copy_(tensors.pop(f"weights.{i}"))
            state[i] = claim(tensors, f"optimizer.{i}.")
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state if self.losses else {}, "param_groups": groups})
        devices = enumerate(layer_devices(self.model))
        places = {f"codecs.{layer}.{role}": device for layer, device in devices for role in ROLES}
        hand_out(tensors, self._named_codecs(), places)
        return self.losses

    def _named_codecs(self) -> list[tuple[str, Codec]]:
        return [(f"codecs.{layer}.{role}", codec) for (role, layer), codec in self.reading.codecs.items()]


def _check(model, tokens, preset, lr, batch_size, micro_batch, checkpoint_every) -> None:
    check_tokens(model, tokens)
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        raise DataError("some weights are not in memory: fine-tune on one device, or a device map without offloading")
    check_batch_size(batch_size)
    check_whole("checkpoint_every", checkpoint_every, 1, MOST)
    if micro_batch is not None:
        check_whole("micro_batch", micro_batch, 1, MOST)
    if isinstance(lr, bool) or not isinstance(lr, int | float) or not 0 < lr <= 1:
        raise DataError(f"lr {lr!r} must be a number above 0, and at most 1")
    if tokens.shape[1] < 2 or len(tokens) <= batch_size:
        raise DataError(
            f"tokens {tuple(tokens.shape)} in batches of {batch_size}: fine-tuning needs sequences of 2 tokens or "
            "more, and a second batch, as the first one initialises the codebooks"
        )
    current().share(tokens.split(batch_size)[-1])  # the smallest batch
    if preset is not None:
        _check_preset(preset, describe(model)["head_dim"])
        check_rope(model, tokens)


def _check_preset(preset: Preset, head_dim: int) -> None:
    """Raise ``DataError`` for what cannot be read back token by token where keys and values are made."""
    if not isinstance(preset, Preset):
        raise DataError(f"preset must be a Preset such as presets.vqllm(), or None, not {type(preset).__name__}")
    reason = None
    if preset.plan is not None:
        reason = "its layers are predicted from others"
    elif not preset.pre_rope:
        reason = "it stores keys after RoPE, and the projections make them before"
    elif any(codec.tokens_per_row > 1 for codec in (preset.key_codec(head_dim), preset.value_codec(head_dim))):
        reason = "it packs blocks of tokens, so that a token would be read before the rest of its block is known"
    if reason:
        raise DataError(f"cannot fine-tune with preset {preset.name!r}: {reason}. vqllm and higgs can be trained with")


def _codecs(preset: Preset | None, about: dict) -> dict[Place, Codec]:
    if preset is None:
        return {}
    make = {"key": preset.key_codec, "value": preset.value_codec}
    return {(role, layer): make[role](about["head_dim"]) for layer in range(about["num_layers"]) for role in ROLES}


def _job(model, tokens: Tensor, preset, codecs, lr, batch_size, micro_batch) -> dict:
    """What a checkpoint must have been made for."""
    about = preset and preset.describe(describe(model)["head_dim"])
    return {
        "job": "finetune",
        "model": weights_fingerprint(model),
        "tokens": [list(tokens.shape), fingerprint(tokens)],
        "preset": about,
        "settings": {"lr": lr, "batch_size": batch_size, "micro_batch": micro_batch, "processes": current().count},
    }


def _compressor(model, preset: Preset | None, codecs: dict[Place, Codec], notes: dict) -> Compressor | None:
    if preset is None:
        return None
    pairs = [tuple(codecs[role, layer] for role in ROLES) for layer in range(len(codecs) // 2)]
    settings = CacheSettings(preset.sink_tokens, preset.recent_window, preset.flush_block, preset.pre_rope)
    return Compressor(preset.name, pairs, settings, describe(model), {"arguments": preset.arguments, **notes})
