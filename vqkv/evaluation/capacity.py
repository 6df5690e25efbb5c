"""The longest context and the largest batch that fit a memory, for any model and preset: what "40K tokens in fp16, 128K
in int4" says of one (source: Hugging Face, "Unlocking Longer Generation with Key-Value Cache Quantization", 2024).

Sizes are measured (``footprint``). Counted: weights and buffers, tied ones once; side information; packed tokens,
sinks, the window and the block that is not packed yet; and as ``working`` a stated reserve for what a pass makes and
drops beside the cache: the keys and values of the layer that is being read, decoded in the model's dtype, and where
layers are predicted from others seven fp32 tensors of that size. Of ``DynamicCache`` it is the keys of a layer, which
``torch.cat`` copies. Sequences have no padding and grow token by token.

Not counted, so ``reserve_gb`` should leave room for it: activations and logits, above all of a prompt in one piece;
decoded tokens that a cache is told to keep; the framework itself, and memory that its allocator cannot use.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from vqkv.cache.compressor import Compressor
from vqkv.errors import DataError
from vqkv.evaluation.footprint import Footprint, dynamic_footprint, footprint, model_shape
from vqkv.models.load import REFUSALS
from vqkv.models.plain import plain
from vqkv.presets import Preset
from vqkv.runtime.checks import check_whole

GB = 10**9
MOST = 1 << 40  # tokens or sequences, where a search ends


@dataclass(frozen=True)
class Capacity:
    """The most that fits ``memory_bytes``: ``context`` tokens in each of as many sequences, or ``batch_size`` sequences
    of as many tokens, as were asked for; 0 if not even one does. ``kinds``: bytes by kind at ``context``.
    ``fp16_...``: the same with transformers' ``DynamicCache`` in 16 bits. ``model_limit``: positions that the model was
    made for, of which memory knows nothing; None where its config does not say."""

    model: str
    dtype: str
    preset: str
    memory_bytes: int
    context: int
    batch_size: int
    kinds: dict[str, int]
    bits_per_value: float
    side_bytes: int
    fp16_context: int
    fp16_batch_size: int
    model_limit: int | None


def capacity(
    model_or_config,
    preset: Preset | Compressor,
    memory_gb: float,
    batch_size: int = 1,
    context: int = 8192,
    dtype: torch.dtype | str | None = None,
    reserve_gb: float = 0,
) -> Capacity:
    """The longest context of ``batch_size`` sequences, and the largest batch of ``context`` tokens each, that fit
    ``memory_gb``, in GB of 10^9 bytes (a GPU's: ``torch.cuda.get_device_properties(0).total_memory / 1e9``). This
    module's docstring says what is counted.

    ``model_or_config``: a loaded model, or a transformers config, or its contents as a dict. What a config describes is
    laid out without memory, its weights in ``dtype`` (by default the config's own, else float16).

    Raises ``DataError`` if the model alone does not fit, for sizes that depend on the text, and for sliding windows,
    encoders or no KV heads; ``FormatError`` for a compressor of another model.
    """
    memory, reserve = _bytes("memory_gb", memory_gb), _bytes("reserve_gb", reserve_gb)
    check_whole("batch_size", batch_size, 1, MOST)
    check_whole("context", context, 1, MOST)
    if not isinstance(preset, (Preset, Compressor)):
        raise DataError(f"pass a Preset such as presets.vqllm(), or a Compressor, not {preset!r}")
    model = architecture(model_or_config, dtype)
    needed = footprint(model, preset)
    _check_room(model, needed, reserve, memory)
    found = _search(needed, memory - reserve, batch_size, context)
    fp16 = _search(dynamic_footprint(model), memory - reserve, batch_size, context)
    return Capacity(
        model=_name(model),
        dtype=str(model.dtype).removeprefix("torch."),
        preset=preset.name,
        memory_bytes=memory,
        context=found[0],
        batch_size=found[1],
        kinds=needed.kinds(found[0], batch_size) | {"reserve": reserve},
        bits_per_value=needed.bits_per_value,
        side_bytes=needed.side_information,
        fp16_context=fp16[0],
        fp16_batch_size=fp16[1],
        model_limit=getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None),
    )


def architecture(model_or_config, dtype: torch.dtype | str | None = None) -> PreTrainedModel:
    """A loaded model as it is; or one laid out from a config, or its contents as a dict, on the ``meta`` device."""
    model = plain(model_or_config)
    if isinstance(model, (PreTrainedConfig, dict)):
        model = _laid_out(model, dtype)
    elif dtype is not None or not isinstance(getattr(model, "config", None), PreTrainedConfig):
        raise DataError(
            f"pass a transformers model without a dtype, or its config, not {type(model).__name__}, {dtype}"
        )
    model_shape(model)  # refuses layers of unequal KV heads
    if any(type(layer) is not DynamicLayer for layer in DynamicCache(config=model.config.get_text_config()).layers):
        raise DataError(
            f"{type(model).__name__} has layers with a sliding window or states, whose DynamicCache stops growing: "
            "every token is counted with sliding_window=None and layer_types full_attention in the config"
        )
    return model


def _laid_out(config: PreTrainedConfig | dict, dtype) -> nn.Module:
    try:
        config = AutoConfig.for_model(**config) if isinstance(config, dict) else copy.deepcopy(config)
        dtype = dtype or getattr(config, "dtype", None) or torch.float16
        dtype = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
        if getattr(config, "quantization_config", None):
            raise ValueError("it has quantized weights, whose bytes it does not tell")
        if config.is_encoder_decoder:
            raise ValueError("what its decoder keeps of the encoder is not counted")
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    except REFUSALS as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise DataError(f"no causal language model can be laid out of this config in {dtype}: {reason}") from error


def _name(model) -> str:
    return getattr(model, "vqkv_name", model.config.name_or_path or type(model).__name__)


def _bytes(label: str, gigabytes) -> int:
    """Raises ``DataError`` unless it is a number of gigabytes from 0 on."""
    if type(gigabytes) not in (int, float) or not 0 <= gigabytes < math.inf:
        raise DataError(f"{label} {gigabytes!r} must be a number of GB (10^9 bytes) from 0 on, such as 24 or 80")
    return round(gigabytes * GB)


def _check_room(model, needed: Footprint, reserve: int, memory: int) -> None:
    if needed.weights + needed.side_information + reserve > memory:
        sizes = (needed.weights, needed.side_information, reserve, memory)
        weights, side, kept, all_ = (f"{size / GB:.4g} GB" for size in sizes)
        raise DataError(
            f"{_name(model)} does not fit: weights of {weights} in {model.dtype}, side information of {side} and a "
            f"reserve of {kept} are more than the memory of {all_}: name more memory, fewer bits or a smaller model"
        )


def _search(needed: Footprint, memory: int, batch_size: int, context: int) -> tuple[int, int]:
    """The longest context at ``batch_size`` and the largest batch at ``context``."""
    return (
        largest(lambda seq_len: needed.peak(seq_len, batch_size) <= memory),
        largest(lambda sequences: needed.peak(context, sequences) <= memory),
    )


def largest(fits: Callable[[int], bool]) -> int:
    """The largest number below ``MOST`` that fits, if all smaller ones do; 0 if none."""
    low, high = 0, MOST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
