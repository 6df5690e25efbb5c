"""A warning for presets that lose a model's keys or values: large biases, outlier channels."""

import warnings

import torch

from vqkv.cache.compressor import Compressor
from vqkv.codecs.predictive import ROLES
from vqkv.errors import DataError
from vqkv.models.capture import capture
from vqkv.runtime.checks import whole_blocks

TOKENS = 256
LITTLE, MUCH = 0.1, 0.5  # shares of the variance: losing less is no damage, losing more is, at any number of bits
WORSE = 16  # times 4^-bits: the share of variance that may be lost; sound caches lose less than a quarter of it
FEWEST_BITS = 0.5  # no preset works below
CONSTANT = 2.0**-18  # of the mean square: a variance below is rounding


@torch.no_grad()
def warn_if_damaged(compressor: Compressor, model, tokens: torch.Tensor) -> None:
    """Warn, naming the layer and its loudest channel, if some keys or values are read back with an error far above what
    their bits should give. (transformers issue 35185: Qwen2.5's key biases, of which a 4-bit cache leaves nothing.)"""
    if compressor.joint:
        return
    restored, tokens, pre_rope = compressor.new_pass(), tokens[:1, :TOKENS], compressor.settings.pre_rope
    stored = capture(model, tokens, pre_rope=pre_rope)
    try:  # the variance is that before RoPE: a rotated bias varies with the position
        before_rope = stored if pre_rope == 1 else capture(model, tokens)
    except DataError:
        before_rope = stored
    for layer, (*pair, keys, values) in enumerate(zip(*stored, *before_rope, strict=True)):
        for role, coder, x, y in zip(ROLES, compressor.coders[layer], pair, (keys, values), strict=True):
            block = max(compressor.block_tokens if compressor.predictions else 1, coder.block_tokens)
            if x.shape[2] < block:
                continue
            x, y = whole_blocks(x.float(), block), y.float()
            bits = 8 * coder.codec.encode(x).nbytes / x.numel()
            error = coder.through(x, restored) - x
            least = CONSTANT * x.square().mean(dim=(0, 2)).sum()
            lost = (error.var(dim=(0, 2)).sum() / y.var(dim=(0, 2)).sum().clamp_min(least)).nan_to_num(0).item()
            if lost <= min(MUCH, max(LITTLE, WORSE * 4**-bits)):
                continue
            mean, spread = y.mean(dim=(0, 2)).abs(), y.std(dim=(0, 2))
            head, channel = divmod(int((mean + spread).argmax()), y.shape[-1])
            warnings.warn(
                f"{compressor.name} loses {min(lost, 1):.0%} of the variance of the {role}s of layer {layer} at "
                f"{bits:.3g} bits: channel {channel} of KV head {head} has mean {mean[head, channel]:.3g}, the median "
                f"spread is {spread.median():.3g}. Use {_remedy(bits, y.shape[1] * y.shape[3])}",
                stacklevel=4,
            )
            return


def _remedy(bits: float, width: int) -> str:
    """Name presets that subtract channel means, with no more bits; ``best`` has some in reserve for other text."""
    if bits < FEWEST_BITS:
        return "more bits"
    group = min(1024, width & -width)
    fitting = [f"higgs({n})" for n in (4, 3, 2) if n + 16 / group <= bits]
    return "a preset that subtracts channel means: " + " or ".join([f"best({0.75 * bits:.2g})", *fitting[:1]])
