"""A process that saves and finds prompts in a folder that others use at the same time."""

import torch
from transformers import AutoModelForCausalLM

import vqkv
from vqkv.cache.prompts import PromptCache

TOKENS = torch.randint(1, 400, (3, 40), generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def work(model_folder: str, compressor_folder: str, folder: str) -> int:
    """How often something was found; all that was found held the right number of tokens and goes on alike."""
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    known, hits = PromptCache(folder, vqkv.Compressor.from_pretrained(compressor_folder), model, 40_000), 0
    for row in [*TOKENS] * 4:
        cache = known.compressor.new_cache(model)
        model(row[None], past_key_values=cache, use_cache=True)
        known.save(row, cache)
        found, count = known.find(torch.cat([row, row]))
        if found is not None:
            hits += 1
            assert count == found.get_seq_length() == 40
            expected, got = (model(row[None], past_key_values=x, use_cache=True).logits for x in (cache, found))
            assert torch.equal(expected, got)
    return hits
