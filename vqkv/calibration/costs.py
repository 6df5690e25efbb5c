"""Costs that errors in each layer's keys and values have for a model."""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import DynamicCache

from vqkv.codecs.pipeline import Chain
from vqkv.codecs.predictive import ROLES, Place
from vqkv.errors import DataError
from vqkv.evaluation.metrics import token_kl
from vqkv.kernels.rope import rotate
from vqkv.models.capture import capture, hooked
from vqkv.models.load import position_rotary
from vqkv.runtime.checks import whole_blocks

FISHER_SEQS, FISHER_TOKENS = 8, 1024  # of a sequence: a backward pass keeps all activations
COST_TOKENS = 1024  # of a sequence, for each place again


def fisher_metrics(model, tokens: Tensor, post_rope: bool = False) -> dict[Place, Tensor]:
    """For each place, fp32 (num_kv_heads, head_dim, head_dim): the Fisher information of the model's predictions about
    a head's key (before RoPE) or value. An error e costs about e' F e / 2 nats of KL, all told: which queries look at
    a key, how much attention a value gets, and what later layers make of it.

    From the gradients of log-likelihoods of next tokens drawn from the model's own predictions, on ``tokens``
    (num_seqs, seq_len), of which the first ``FISHER_TOKENS`` of ``FISHER_SEQS`` sequences are used, one sequence at a
    time. Raises ``DataError`` for keys after RoPE, and for a model that makes NaN or infinity.
    """
    if post_rope and position_rotary(model) is not None:
        raise DataError("what errors of keys cost is known before RoPE only: use a preset with pre_rope=True")
    tokens = tokens[:FISHER_SEQS, :FISHER_TOKENS]
    sums: dict[Place, Tensor] = {}
    generator = torch.Generator(model.device).manual_seed(0)
    with torch.inference_mode(False), torch.enable_grad():
        for sequence in tokens.clone().split(1):
            added: dict[Place, tuple] = {}  # source, its part of the projection, and zeros that gradients are taken for

            def perturb(source, role, part, output, added=added):
                zeros = torch.zeros_like(output, requires_grad=True)
                added[role, source.layer_idx] = source, part, zeros
                return output + zeros

            with hooked(model, perturb):
                logits = model(sequence.to(model.device), use_cache=False).logits[0].float()
            if not logits.isfinite().all():
                raise DataError("the model itself makes NaN or infinite logits: check its weights and dtype")
            drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)
            score = logits.log_softmax(-1).gather(-1, drawn).sum()
            gradients = torch.autograd.grad(score, [x for _, _, x in added.values()])
            for (place, (source, part, _)), gradient in zip(added.items(), gradients, strict=True):
                rows = source.heads(gradient, part)[0].float()
                sums[place] = sums.get(place, 0) + rows.mT @ rows
    return {place: total / tokens.numel() for place, total in sums.items()}


@torch.inference_mode()
def cost_curves(model, compressor, tokens: Tensor) -> dict[Place, Tensor]:
    """For each place, float64 (n, 2): bits a value, and the KL in nats that its error alone is expected to cost on
    ``tokens`` (num_seqs, seq_len), of whose sequences the first ``COST_TOKENS`` are used. The KL is measured with what
    ``compressor`` restores, and goes with the squared error from there. Raises ``DataError`` for codecs that are no
    chain, or whose bits cannot be chosen."""
    tokens = tokens[:, :COST_TOKENS].to(model.device)
    settings, found = compressor.settings, {}
    exact = model(tokens, use_cache=False).logits
    rotary = position_rotary(model) if settings.pre_rope else None
    for place, codec, rows, restored in _restored(model, compressor, tokens):
        if not isinstance(codec, Chain):
            raise DataError(f"{type(codec).__name__} of {place} cannot trade bits for error: use a chain")
        curve, vectors = codec.rates(rows), codec.vectors(rows)
        error = (vectors - codec.quantizer.quantize_dequantize(vectors)).double().square().mean().item()
        cache = _Substituted(place, restored, settings.sink_tokens, rotary)
        logits = model(tokens, past_key_values=cache, use_cache=True).logits
        kl = token_kl(exact, logits).mean().item()
        found[place] = torch.stack([curve[:, 0], curve[:, 1] * (max(kl, 0.0) / error if error else 0.0)], dim=1)
    return found


def _restored(model, compressor, tokens: Tensor) -> Iterator[tuple]:
    """For each place: its codec, what that was given (after prediction), and what is read back of the place's tokens
    from the first after the sinks on."""
    known, sinks = compressor.new_pass(), compressor.settings.sink_tokens
    keys, values = capture(model, tokens, post_rope=not compressor.settings.pre_rope)
    for layer, pair in enumerate(zip(keys, values, strict=True)):
        for coder, x in zip(compressor.coders[layer], pair, strict=True):
            x = whole_blocks(x[:, :, sinks:].float(), compressor.tokens_per_row)
            rows = x if coder.prediction is None else x - coder.prediction(known, x)
            yield coder.place, coder.codec, rows, coder.through(x, known)


class _Substituted(DynamicCache):
    """One pass in which attention reads ``restored`` (batch, num_kv_heads, tokens, head_dim) at one place, from the
    token ``start`` on; keys before RoPE are rotated by ``rotary``."""

    def __init__(self, place: Place, restored: Tensor, start: int, rotary=None):
        super().__init__()
        self.place, self.restored, self.start, self.rotary = place, restored, start, rotary

    def update(self, key_states, value_states, layer_idx: int, *args, **kwargs):
        pair = dict(zip(ROLES, super().update(key_states, value_states, layer_idx, *args, **kwargs), strict=True))
        role, layer = self.place
        if layer == layer_idx:
            x, stop = pair[role].clone(), self.start + self.restored.shape[2]
            x[:, :, self.start : stop] = self._as_read(role, stop).to(x)
            pair[role] = x
        return tuple(pair.values())

    def _as_read(self, role: str, stop: int) -> Tensor:
        if role == "value" or self.rotary is None:
            return self.restored
        positions = torch.arange(self.start, stop, device=self.restored.device)[None]
        cos, sin = self.rotary.forward(self.restored, positions)
        return rotate(self.restored, cos.float(), sin.float())
