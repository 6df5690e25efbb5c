"""model + corpus + preset -> compressor, in one pass over the tokens."""

import torch
from tqdm import tqdm

from vqkv.capture import capture, check_batch_size, check_rope, check_tokens
from vqkv.compressor import CacheSettings, Compressor
from vqkv.errors import DataError
from vqkv.models import describe
from vqkv.presets import Preset


def calibrate(model, tokens: torch.Tensor, preset: Preset, batch_size: int = 8, progress: bool = True) -> Compressor:
    """Fit ``preset`` to ``model`` on ``tokens`` (num_seqs, seq_len): each batch of sequences is captured once and
    passed to every layer's codecs, so memory does not grow with the number of tokens.

    The first batch initialises the codebooks, each further batch is one learning step. Raises ``DataError`` for an
    empty input, a head_dim that the preset cannot divide, or fewer vectors in the first batch than codes.
    """
    if not isinstance(preset, Preset):
        raise DataError(f"preset must be a Preset such as presets.vqllm(), not {type(preset).__name__}")
    check_tokens(model, tokens)
    check_batch_size(batch_size)
    if preset.pre_rope:
        check_rope(model, tokens)
    about = describe(model)
    codecs = [
        (preset.key_codec(about["head_dim"]), preset.value_codec(about["head_dim"])) for _ in range(about["num_layers"])
    ]
    for batch in tqdm(
        tokens.split(batch_size), desc=f"calibrate {preset.name}", unit="batch", disable=None if progress else True
    ):
        keys, values = capture(model, batch, batch_size, post_rope=not preset.pre_rope)
        for (key_codec, value_codec), key, value in zip(codecs, keys, values, strict=True):
            for codec, x in ((key_codec, key), (value_codec, value)):
                if not codec.ready:  # some codecs have nothing to learn
                    codec.partial_fit(x)
    for pair in codecs:
        for codec in pair:
            codec.finalize()
    settings = CacheSettings(preset.sink_tokens, preset.recent_window, preset.flush_block, preset.pre_rope)
    notes = {"arguments": preset.arguments, "tokens": tokens.numel(), "batch_size": batch_size}
    return Compressor(preset.name, codecs, settings, about, notes)
