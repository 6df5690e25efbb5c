"""Questions about facts in a text, answered by a model that reads a compressed cache."""

import torch
from torch import Tensor

from vqkv.data.facts import FactsBatch, all_right
from vqkv.models.plain import evaluating


@torch.no_grad()
def answered(model, compressor, batch: FactsBatch) -> Tensor:
    """Which questions of ``batch`` the model answers with every token right, bool (n, num_facts): what greedy
    generation would say after the same conversation. The text is one prefill; the questions read it as ``compressor``
    stores it, or exactly if that is None."""
    model, right = evaluating(model), []
    for tokens, question in zip(batch.tokens.to(model.device), batch.question):
        asked = (question > 0).nonzero().flatten().to(tokens.device)
        cache = None if compressor is None else compressor.new_cache(model)
        first = 0
        if cache is not None:
            first = batch.text_len
            model(tokens[None, :first], past_key_values=cache, use_cache=True, logits_to_keep=1)
        piece = tokens[None, first : asked[-1]]  # the last token answered is not read
        kept = {"use_cache": cache is not None, "logits_to_keep": asked - 1 - first}
        right.append(model(piece, past_key_values=cache, **kept).logits[0].argmax(-1) == tokens[asked])
    return all_right(batch, torch.cat(right).cpu())
