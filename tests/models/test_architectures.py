"""Every causal architecture that can be built small: it works with every preset, or is refused by name."""

import pytest
import torch
from architectures import NAMES, build
from transformers import DynamicCache

from vqkv import DataError, calibrate, presets
from vqkv.evaluation.metrics import token_kl

TOKENS = torch.randint(3, 100, (16, 40), generator=torch.Generator().manual_seed(0))
LOSSY = {
    "quanto": presets.quanto(4, 16),
    "kivi": presets.kivi(4, 8, recent_window=4),
    "higgs": presets.higgs(4, recent_window=4),
    "vqllm": presets.vqllm(4, 16, 4, kmeans_iterations=1),
    "aqua": presets.aqua(presets.higgs(4), recent_window=4),
    "best": presets.best(4.0, 1, 1, block=8),
}


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_every_architecture_works_or_is_refused_by_name(name):
    try:
        model = build(name)
        expected = _logits(model, DynamicCache(config=model.config))
    except Exception as error:  # whatever a configuration or a model has against being small
        pytest.skip(f"cannot be built small: {type(error).__name__}")
    try:
        exact = calibrate(model, TOKENS, presets.fp16(), progress=False)
    except DataError as error:
        assert type(model).__name__ in str(error)
        return
    assert token_kl(expected, _logits(model, exact.new_cache(model))).mean() < 1e-5
    for preset in LOSSY.values():
        compressor = calibrate(model, TOKENS, preset, progress=False)
        assert token_kl(expected, _logits(model, compressor.new_cache(model))).mean() < 0.05


def _logits(model, cache) -> torch.Tensor:
    """Of two sequences, the first half at once and the rest token by token."""
    first, *rest = TOKENS[:2].split([20] + [1] * 20, dim=1)
    return torch.cat([model(x, past_key_values=cache, use_cache=True).logits for x in (first, *rest)], dim=1)
