"""Models that see images: the language model's keys and values are compressed, an image's tokens like others."""

import pytest
import torch
import transformers

from vqkv import calibrate, presets
from vqkv.models.metrics import token_kl

IMAGE = 5  # token id
TOKENS = torch.randint(6, 100, (16, 40), generator=torch.Generator().manual_seed(0))
TEXT = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2} | {
    "image_size": 16, "patch_size": 8,
}  # fmt: skip


def llava():
    vision, text = transformers.CLIPVisionConfig(**VISION), transformers.LlamaConfig(**TEXT)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE)
    return transformers.LlavaForConditionalGeneration(config)


def gemma3():
    vision = transformers.SiglipVisionConfig(**VISION)
    text = transformers.Gemma3TextConfig(**TEXT, head_dim=16, sliding_window=16)
    tokens = {"image_token_id": IMAGE, "boi_token_index": 3, "eoi_token_index": 4, "mm_tokens_per_image": 4}
    return transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(vision_config=vision, text_config=text, **tokens)
    )


def qwen2_vl():
    """No image here: that its positions have three parts is what matters."""
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    config = transformers.Qwen2VLConfig(text_config=TEXT | {"rope_parameters": rope}, vision_config={"depth": 1})
    return transformers.Qwen2VLForConditionalGeneration(config)


@pytest.mark.parametrize("make", [llava, gemma3, qwen2_vl])
def test_generate_reads_images_from_a_compressed_cache(make):
    torch.manual_seed(0)
    model, given = make().eval(), {"input_ids": TOKENS[:2].clone()}
    if make is not qwen2_vl:
        given["input_ids"][:, 3:7] = IMAGE
        given["pixel_values"] = torch.randn(2, 3, 16, 16)
    if make is gemma3:
        given["token_type_ids"] = (given["input_ids"] == IMAGE).long()
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    exact = model.generate(**given, **options)
    for preset, most in ((presets.fp16(), 1e-6), (presets.best(4.0, 1 << 20, 1, block=8), 1e-3)):
        compressor = calibrate(model, TOKENS, preset, progress=False)
        cache = compressor.new_cache(model)
        read = model.generate(**given, **options, past_key_values=cache)
        kl = token_kl(*(torch.stack(out.logits) for out in (exact, read)))
        alike = (exact.sequences == read.sequences)[:, 39:-1].cumprod(dim=1).bool().T  # until a near tie
        assert kl[alike].mean() < most and alike[:4].all() and cache.report().seq_len == 51
    assert compressor.settings.pre_rope is (make is not qwen2_vl)
