"""Small random models of every causal architecture that transformers ships and that can be built small, and what
becomes of their caches. ``python tests/models/architectures.py`` writes the table of ``vqkv/models/README.md``."""

from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from vqkv import DataError, calibrate, presets
from vqkv.models.layers import kv_layers
from vqkv.models.metrics import token_kl
from vqkv.models.rope import rotations

README = Path(__file__).parents[2] / "vqkv" / "models" / "README.md"
HEAD = "| model_type | layers | keys | presets |\n|---|---|---|---|\n"
TOKENS = torch.randint(3, 100, (16, 40), generator=torch.Generator().manual_seed(0))
PIECES = (1, 1, 1, 7, 10)  # of the last tokens
LOSSY = {
    "quanto": replace(presets.quanto(4, 16), block_tokens=8),
    "hqq": replace(presets.hqq(4, 16), block_tokens=8),
    "kivi": presets.kivi(4, 8, recent_window=4),
    "kvquant": presets.kvquant(4, block_tokens=8),
    "higgs": presets.higgs(4, recent_window=4),
    "vq": presets.vq(2, 8, 16),
    "rvq2": presets.rvq2(4, 8, 16),
    "vqq": presets.vqq(0.1, 8, 16),
    "vqq_product": presets.vqq_product(0.1, 8, 16),
    "vqllm": presets.vqllm(4, 16, 4, kmeans_iterations=1),
    "aqua": presets.aqua(presets.higgs(4), recent_window=4),
    "best (short)": presets.best(4.0, 1, 1, block_tokens=8),
    "best (long)": presets.best(4.0, 1 << 20, 1, block_tokens=8),
}
NAMES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
WIDTHS = ("hidden_size", "n_embd", "d_model", "lru_width")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
MLPS = ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
STATES = {
    "state_size": 8, "expand": 2, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1,
    "mamba_chunk_size": 16, "chunk_size": 16,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
SMALL = dict.fromkeys(WIDTHS, 64) | dict.fromkeys(MLPS, 96) | LATENT | STATES
SMALL |= dict.fromkeys((*LAYERS, *HEADS, *EXPERTS, "decoder_attention_heads", "encoder_attention_heads"), 4) | {
    "moe_intermediate_size": 32, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "num_key_value_heads": 2,
    "head_dim": 16, "rotary_dim": 8, "sliding_window": 16, "attention_window_size": 16, "vocab_size": 128,
    "max_position_embeddings": 512, "n_positions": 512,
    "is_decoder": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 128, "num_kv_shared_layers": 0,
}  # fmt: skip
HALF = ["linear_attention", "full_attention"] * 2
UNEQUAL = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "per_layer_config": {1: {"head_dim": 32}, 3: {"head_dim": 32}},
}
OWN = {  # what a type's own configuration wants
    "bailing_hybrid": {"layer_types": HALF, "head_dim": 8, "linear_head_dim": 16, "linear_num_heads": 4},
    "bamba": {"attn_layer_indices": [1, 3]},
    "falcon": {"num_kv_heads": 4, "multi_query": True},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma4_text": UNEQUAL,
    "gemma4_unified_text": UNEQUAL,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 16},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
}
WIDE = {  # two layers as wide as a published model's, of few words
    "qwen3 (8B)": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "gemma3_text (4B)": {
        "hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "max_position_embeddings": 131072, "sliding_window": 1024,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        },
    },
}  # fmt: skip
LONG = torch.randint(3, 100, (2, 1100), generator=torch.Generator().manual_seed(0))  # past Gemma's window


def wide(name: str):
    """A model with two layers of a published model's widths and random weights."""
    model_type = name.split()[0]
    config = CONFIG_MAPPING[model_type](**WIDE[name], num_hidden_layers=2, vocab_size=128, pad_token_id=0)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def build(model_type: str):
    """A model of this type with random weights. Raises whatever its configuration has against being small."""
    config_class, own = CONFIG_MAPPING[model_type], OWN.get(model_type, {})
    defaults = config_class().to_dict()
    latent = {"num_key_value_heads": 4, "head_dim": 8} if "kv_lora_rank" in defaults else {}  # all heads' come of one
    config = config_class(**{name: value for name, value in (SMALL | latent).items() if name in defaults} | own)
    with torch.device("meta"):  # as some parts keep billions of parameters whatever is asked for
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if size > 5e6:
        raise ValueError(f"{size:,} parameters: parts of it stay large")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model(TOKENS[:1, :2], use_cache=False)
    return model


def row(name: str, lossy: dict = LOSSY) -> list[str] | None:
    """The architecture's cells of the table, with these presets; None if it cannot be built small. Raises for a cache
    that is wrong."""
    tokens = LONG if name in WIDE else TOKENS
    try:
        model = wide(name) if name in WIDE else build(name)
    except Exception:  # whatever a configuration has against being small
        return None
    try:
        exact = calibrate(model, tokens[:2], presets.fp16(), progress=False)
    except DataError as error:
        return [name, "-", "-", f"refused: {error}"]
    try:
        expected, dynamic = _read(model, tokens, DynamicCache(config=model.config))
    except Exception:  # transformers itself cannot read it piece by piece
        return None
    logits, cache = _read(model, tokens, exact.new_cache(model))
    assert token_kl(expected, logits).mean() < 1e-5, f"{name}: fp16"
    assert missed(cache, dynamic) < 1e-5, f"{name}: fp16"
    refused = [
        reason
        for label, preset in lossy.items()
        if (reason := _refusal(model, tokens, label, preset, expected, dynamic))
    ]
    shapes = {layer.shape for layer in kv_layers(model)}
    layers = f"{len(kv_layers(model))} of {len(dynamic.layers)}" + (", of unequal shape" if len(shapes) > 1 else "")
    layers += ", sliding" if any(layer.is_sliding for layer in cache.compressed) else ""
    return [name, layers, _keys(model), "all but " + "; ".join(refused) if refused else "all"]


def missed(cache, exact) -> float:
    """The worst layer's share of the energy of its keys or values that is read back wrong; a random model's logits
    hardly show it."""
    shares = []
    for index, theirs in enumerate(exact.layers):
        if getattr(theirs, "keys", None) is not None:
            read = cache.update(theirs.keys[:, :, :0], theirs.values[:, :, :0], index)  # no new tokens, all the old
            for x, y in zip(read, (theirs.keys, theirs.values), strict=True):
                seen = min(x.shape[2], y.shape[2])  # later queries of a sliding window see the last ones
                x, y = x[:, :, -seen:], y[:, :, -seen:]
                shares.append(((x - y).square().sum() / y.square().sum()).item())
    return max(shares)


def _refusal(model, tokens, label: str, preset, expected, exact) -> str | None:
    """Why a preset is refused; None if it works."""
    try:
        compressor = calibrate(model, tokens, preset, progress=False)
    except DataError as error:
        return f"{label}: {error}"
    logits, cache = _read(model, tokens, compressor.new_cache(model))
    kl, packed = token_kl(expected, logits).mean(), [store.parts[1] for x in cache.compressed for store in x.stores]
    assert min(packed) > 0 or any(x.is_sliding for x in cache.compressed), f"{label} packs nothing"
    assert kl < 0.05, f"{type(model).__name__}: KL of {label} is {kl:.2g}"
    wrong = missed(cache, exact)
    return None if wrong < 0.75 else f"{label}: reads a layer's keys or values back over 75% wrong"


def _keys(model) -> str:
    try:
        rotated, layers = sum(map(bool, rotations(model))), len(kv_layers(model))
    except DataError as error:
        return f"after RoPE: {error}"
    return {0: "as they come", layers: "before RoPE"}.get(rotated, f"before RoPE in {rotated} of {layers}")


@torch.inference_mode()
def _read(model, tokens, cache) -> tuple[torch.Tensor, DynamicCache]:
    """Logits of two sequences, read in pieces."""
    parts = tokens[:2].split([tokens.shape[1] - sum(PIECES), *PIECES], dim=1)
    return torch.cat([model(x, past_key_values=cache, use_cache=True).logits for x in parts], dim=1), cache


def table() -> dict[str, list[str]]:
    """The committed rows, by architecture."""
    rows = README.read_text().split(HEAD)[1].splitlines()
    return {cells[0]: cells for line in rows if (cells := line.strip("| ").split(" | "))}


if __name__ == "__main__":
    rows = ["| " + " | ".join(cells) + " |" for name in tqdm([*NAMES, *WIDE]) if (cells := row(name))]
    before = README.read_text().split(HEAD)[0]
    README.write_text(before + HEAD + "\n".join(rows) + "\n")
