"""Costs that errors in each layer's keys and values have for a model's predictions."""

import itertools

import torch
from torch import Tensor

from vqkv.codecs.pipeline import Chain
from vqkv.codecs.predictive import ROLES, LayerRole
from vqkv.errors import DataError
from vqkv.models.capture import capture
from vqkv.models.layers import InterceptingCache, kv_layers
from vqkv.models.rope import rotations
from vqkv.runtime.checks import whole_blocks

FISHER_SEQS, FISHER_TOKENS = 8, 512  # of a sequence: a backward pass keeps all activations, and takes two forward ones
COST_TOKENS = 1024  # of a sequence that errors are measured on


def fisher_metrics(model, tokens: Tensor, pre_rope: int = True) -> dict[LayerRole, Tensor]:
    """Compute the Fisher information of a model's predictions about a head's key (before RoPE, or after) or value, by
    role and layer: fp32 (num_kv_heads, head_dim, head_dim). An error e costs about e' F e / 2 nats of KL.

    From the gradients of log-likelihoods of next tokens drawn from the model's own predictions, on the first
    ``FISHER_TOKENS`` of ``FISHER_SEQS`` sequences of ``tokens`` (num_seqs, seq_len), one sequence at a time. Raises
    ``DataError`` for a model that makes NaN or infinity.
    """
    rotated = rotations(model, pre_rope) if pre_rope else [None] * len(kv_layers(model))
    tokens = tokens[:FISHER_SEQS, :FISHER_TOKENS]
    sums: dict[LayerRole, Tensor] = {}
    generator = torch.Generator(model.device).manual_seed(0)
    with torch.inference_mode(False), torch.enable_grad():
        for sequence in tokens.clone().split(1):
            added: dict[LayerRole, Tensor] = {}  # zeros that gradients are taken for

            def perturb(layer, keys, values, added=added):
                for role, x in zip(ROLES, (keys, values), strict=True):
                    added[role, layer] = torch.zeros_like(x, requires_grad=True)
                error, rotation = added["key", layer], rotated[layer]
                error = error if rotation is None else rotation.rotated(error).to(keys)  # as the key is
                return keys + error, values + added["value", layer]

            cache = InterceptingCache(model, perturb)
            logits = model(sequence.to(model.device), past_key_values=cache, use_cache=True).logits
            logits = logits[0].float()
            if not logits.isfinite().all():
                raise DataError("the model itself makes NaN or infinite logits: check its weights and dtype")
            drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)
            score = logits.log_softmax(-1).gather(-1, drawn).sum()
            gradients = torch.autograd.grad(score, [*added.values()], allow_unused=True)
            for (role, layer), gradient in zip(added, gradients, strict=True):
                if gradient is None:
                    raise DataError(
                        f"no gradient of {type(model).__name__} reaches layer {layer}, so what its errors cost is not "
                        "known: use a preset without error weights, such as higgs or vqllm"
                    )
                rows = gradient[0].float()
                sums[role, layer] = sums.get((role, layer), 0) + rows.mT @ rows
    return {role_layer: total / tokens.numel() for role_layer, total in sums.items()}


@torch.no_grad()
def cost_curves(model, compressor, tokens: Tensor, metrics: dict[LayerRole, Tensor]) -> dict[LayerRole, Tensor]:
    """Estimate, by role and layer, float64 (n, 2): bits a value, and the KL in nats that its error costs on the first
    ``COST_TOKENS`` of each of ``tokens`` (num_seqs, seq_len).

    An error e of a head costs e' F e / 2, with F from ``metrics`` (``fisher_metrics``), for what ``compressor``
    restores; other bits cost in proportion to their squared error, without a pass of the model. Raises ``DataError``
    for codecs whose bits cannot be chosen."""
    restored, sinks, curves = compressor.new_pass(), compressor.settings.sink_tokens, {}
    tokens = tokens[:, :COST_TOKENS].to(model.device)
    stored = zip(*capture(model, tokens, pre_rope=compressor.settings.pre_rope), strict=True)
    for coder, x in zip(itertools.chain(*compressor.coders), itertools.chain(*stored), strict=True):
        codec = coder.codec
        assert isinstance(codec, Chain)
        x = whole_blocks(x[:, :, sinks:].float(), compressor.block_tokens)
        residual = x if coder.prediction is None else x - coder.prediction(restored, x)
        error = coder.through(x, restored) - x
        vectors = codec.vectors(residual)
        curve = codec.quantizer.rates(vectors)
        squared = (vectors - codec.quantizer.quantize_dequantize(vectors)).double().square().mean().item()
        weighted = torch.einsum("bhtc,hcd,bhtd->bt", error, metrics[coder.layer_role].to(error), error)
        cost = weighted.double().mean().item() / 2
        curves[coder.layer_role] = torch.stack([curve[:, 0], curve[:, 1] * (cost / squared if squared else 0.0)], dim=1)
    return curves
