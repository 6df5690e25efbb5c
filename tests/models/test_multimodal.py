"""Models that see images: the language model's keys and values are compressed, an image's tokens like others."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from vqkv import calibrate, presets
from vqkv.models.metrics import token_kl

IMAGE = 5  # token id
TOKENS = torch.randint(6, 100, (16, 40), generator=torch.Generator().manual_seed(0))
TEXT = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
CONFIGS = {
    "llava": {
        "text_config": TEXT | {"model_type": "llama"}, "vision_config": VISION | {"model_type": "clip_vision_model"},
        "image_token_index": IMAGE,
    },
    "gemma3": {
        "text_config": TEXT | {"head_dim": 16, "sliding_window": 16}, "vision_config": VISION,
        "image_token_id": IMAGE, "boi_token_index": 3, "eoi_token_index": 4, "mm_tokens_per_image": 4,
    },
    # no image: that its positions have three parts is what matters
    "qwen2_vl": {"text_config": TEXT | {"rope_parameters": ROPE}, "vision_config": {"depth": 1}},
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_generate_reads_images_from_a_compressed_cache(name):
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[name](**CONFIGS[name])).eval()
    given = {"input_ids": TOKENS[:2].clone()}
    if name != "qwen2_vl":
        given["input_ids"][:, 3:7] = IMAGE
        given["pixel_values"] = torch.randn(2, 3, 16, 16)
    if name == "gemma3":
        given["token_type_ids"] = (given["input_ids"] == IMAGE).long()
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    exact = model.generate(**given, **options)
    for preset, most in ((presets.fp16(), 1e-6), (presets.best(4.0, 1 << 20, 1, block_tokens=8), 1e-3)):
        compressor = calibrate(model, TOKENS, preset, progress=False)
        cache = compressor.new_cache(model)
        read = model.generate(**given, **options, past_key_values=cache)
        kl = token_kl(*(torch.stack(out.logits) for out in (exact, read)))
        alike = (exact.sequences == read.sequences)[:, 39:-1].cumprod(dim=1).bool().T  # until a near tie
        assert kl[alike].mean() < most and alike[:4].all() and cache.report().seq_len == 51
    assert compressor.settings.pre_rope is (name != "qwen2_vl")
