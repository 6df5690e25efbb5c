"""A model is asked for its layers while another thread runs it."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import DynamicCache

from vqkv import load_model
from vqkv.models.layers import kv_layers

TOKENS = torch.randint(1, 4000, (8, 48), generator=torch.Generator().manual_seed(0))


class Held(DynamicCache):
    """Waits in the last layer for ``go``, once ``inside`` is set."""

    def __init__(self, config, inside, go):
        super().__init__(config=config)
        self.inside, self.go = inside, go

    def update(self, keys, values, layer_idx, *args, **kwargs):
        if layer_idx == 2:
            self.inside.set()
            self.go.wait(30)
        return super().update(keys, values, layer_idx, *args, **kwargs)


def test_a_pass_that_ends_during_a_probe_disturbs_neither(llama_folder):
    model, inside, go = load_model(llama_folder)[0], threading.Event(), threading.Event()
    held, main = Held(model.config, inside, go), threading.get_ident()
    model.model.register_forward_pre_hook(lambda *_: None)  # modules without hooks do not look for them at the end
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(model, TOKENS, past_key_values=held)
        inside.wait(30)

        def let_it_end(*_):
            if threading.get_ident() == main:
                go.set()
                other.result(30)

        model.model.layers[1].mlp.register_forward_hook(let_it_end)
        assert [layer.attention for layer in kv_layers(model)] == [each.self_attn for each in model.model.layers]
        assert other.result(30).logits.shape[:2] == TOKENS.shape
