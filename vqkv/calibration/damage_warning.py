"""A warning for presets that a model's keys or values are too much for: large biases, outlier channels."""

import warnings

import torch

from vqkv.cache.compressor import Compressor
from vqkv.codecs.predictive import ROLES
from vqkv.errors import DataError
from vqkv.models.capture import capture
from vqkv.runtime.checks import whole_blocks

TOKENS = 256
LITTLE, MUCH = 0.1, 0.5  # lost shares of the variance that are nobody's ruin, and somebody's at any number of bits
WORSE = 16  # times 4^-bits: the share of variance that may be lost; what survives loses less than a quarter of it
FEWEST_BITS = 0.5  # below which no preset is known to survive
CONSTANT = 2.0**-18  # of the mean square: a variance below is rounding


@torch.no_grad()
def warn_if_destroyed(compressor: Compressor, model, tokens: torch.Tensor) -> None:
    """Warn, naming the layer and its loudest channel, if some keys or values are read back with an error far above what
    their bits should give. (transformers issue 35185: Qwen2.5's key biases, of which a 4-bit cache leaves nothing.)"""
    if compressor.joint:
        return
    known, tokens, pre_rope = compressor.new_pass(), tokens[:1, :TOKENS], compressor.settings.pre_rope
    stored = capture(model, tokens, pre_rope=pre_rope)
    try:  # a bias that turns with the position is no variance of what is said
        still = stored if pre_rope == 1 else capture(model, tokens)
    except DataError:
        still = stored
    for layer, (*pair, keys, values) in enumerate(zip(*stored, *still, strict=True)):
        for role, coder, x, y in zip(ROLES, compressor.coders[layer], pair, (keys, values), strict=True):
            block = max(compressor.tokens_per_row if compressor.predictions else 1, coder.tokens_per_row)
            if x.shape[2] < block:
                continue
            x = whole_blocks(x.float(), block)
            bits = 8 * coder.codec.encode(x).nbytes / x.numel()
            error = coder.through(x, known) - x
            least = CONSTANT * x.square().mean(dim=(0, 2)).sum()
            lost = (error.var(dim=(0, 2)).sum() / y.float().var(dim=(0, 2)).sum().clamp_min(least)).nan_to_num(0).item()
            if lost > min(MUCH, max(LITTLE, WORSE * 4**-bits)):
                warnings.warn(_message(compressor.name, layer, role, y.float(), bits, lost), stacklevel=4)
                return


def _message(name: str, layer: int, role: str, x: torch.Tensor, bits: float, lost: float) -> str:
    mean, spread = x.mean(dim=(0, 2)).abs(), x.std(dim=(0, 2))
    head, channel = divmod(int((mean + spread).argmax()), x.shape[-1])
    return (
        f"{name} loses {min(lost, 1):.0%} of the variance of the {role}s of layer {layer} at {bits:.3g} bits: channel "
        f"{channel} of KV head {head} has mean {mean[head, channel]:.3g}, the median spread is {spread.median():.3g}. "
        f"Use {_remedy(bits, x.shape[1] * x.shape[3])}"
    )


def _remedy(bits: float, width: int) -> str:
    """Presets that subtract channel means, with no more bits; ``best`` has room for text unlike the calibration's."""
    if bits < FEWEST_BITS:
        return "more bits"
    group = min(1024, width & -width)
    fitting = [f"higgs({n})" for n in (4, 3, 2) if n + 16 / group <= bits]
    return "a preset that subtracts channel means: " + " or ".join([f"best({0.75 * bits:.2g})", *fitting[:1]])
