"""Model name -> model and tokenizer; the modules of a model that make its keys and values."""

import copy
import hashlib
import inspect
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from vqkv.errors import DataError, FormatError, UnknownNameError

DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
CHANGING_ROPE = ("dynamic", "longrope")
ROUNDING = 2**-7  # bf16 keeps 8 bits
# What transformers, safetensors and torch raise for a name or files that cannot be loaded.
LOADING_ERRORS = (OSError, ValueError, KeyError, TypeError, RuntimeError, AssertionError, SafetensorError)
BUNDLED = {f"vqkv/{name}": Path(__file__).parent.parent / "reference" / name for name in ("llama-mini", "gpt2-mini")}


@dataclass(frozen=True)
class KVSource:
    """The modules whose outputs are one layer's keys and values, before RoPE.

    ``key_module``'s output holds the keys as (batch, seq_len, ...num_kv_heads * head_dim); in a fused projection
    (GPT-2) both modules are the same and ``key_part`` / ``value_part`` say which of ``num_parts`` equal parts.
    """

    layer_idx: int
    attention: nn.Module
    key_module: nn.Module
    value_module: nn.Module
    num_kv_heads: int
    head_dim: int
    key_part: int = 0
    value_part: int = 0
    num_parts: int = 1

    @property
    def sides(self) -> tuple[tuple[nn.Module, int], tuple[nn.Module, int]]:
        """Module and part of the keys, and of the values."""
        return (self.key_module, self.key_part), (self.value_module, self.value_part)

    def heads(self, output: torch.Tensor, part: int) -> torch.Tensor:
        """A projection's output -> (batch, num_kv_heads, seq_len, head_dim)."""
        batch, seq_len = output.shape[:2]
        flat = output.reshape(batch, seq_len, -1).chunk(self.num_parts, dim=-1)[part]
        return flat.reshape(batch, seq_len, self.num_kv_heads, self.head_dim).transpose(1, 2)


def load_model(
    name: str,
    dtype: torch.dtype | str | None = None,
    device: str | dict = "cpu",
    trust_remote_code: bool = False,
    offload_folder: str | None = None,
):
    """(model, tokenizer) of a bundled reference model, a local folder or a hub name, in evaluation mode.

    ``dtype``: default fp32 on a CPU, the checkpoint's own elsewhere. ``device``: ``cpu``, ``cuda``, ``cuda:1``, or a
    device map of ``accelerate`` for a model larger than a card: ``auto`` (all cards, then main memory, then
    ``offload_folder``), ``balanced``, ``balanced_low_0``, ``sequential``, or a dict from modules to devices. Only
    safetensors weights are read, and no code that comes with a model is run unless ``trust_remote_code``. Raises
    ``UnknownNameError`` when nothing of that name can be loaded.
    """
    if str(name).startswith("vqkv/") and name not in BUNDLED:
        raise UnknownNameError("model", name, BUNDLED)
    path = BUNDLED.get(name, name)
    device_map = device if isinstance(device, dict) or device in DEVICE_MAPS else None
    if dtype is None:
        on_cpu = str(device).split(":")[0] == "cpu" or (device_map is not None and not torch.cuda.is_available())
        dtype = torch.float32 if on_cpu else "auto"
    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # which would end up in a notebook's output
    try:
        model, tokenizer = _load(path, dtype, trust_remote_code, device_map, offload_folder)
        model = model.to(device) if device_map is None else model
    except LOADING_ERRORS as error:
        reason = f"{type(error).__name__}: {str(error)[:300]}"
        if Path(path).is_dir():
            raise FormatError(f"folder {name!r} holds no model that can be loaded on {device!r}: {reason}") from error
        raise UnknownNameError(
            "model", name, BUNDLED, f"A folder or hub name also works, but here: {reason}"
        ) from error
    model.vqkv_name = str(name)
    return model.eval(), tokenizer


def _load(path, dtype, trust_remote_code: bool, device_map, offload_folder):
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    model, info = AutoModelForCausalLM.from_pretrained(
        path,
        config=config,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        use_safetensors=True,
        output_loading_info=True,
        device_map=device_map,
        offload_folder=offload_folder,
    )
    if info["missing_keys"]:
        raise ValueError(f"the checkpoint lacks the weights {sorted(info['missing_keys'])[:3]}")
    return model, tokenizer


def untrained(model, seed: int):
    """A model of the same shape, dtype and device with random weights, as ``transformers`` draws them for training."""
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        fresh = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), dtype=model.dtype)
    fresh.vqkv_name = f"{getattr(model, 'vqkv_name', model.config.model_type)} untrained, seed {seed}"
    return fresh.to(model.device).eval()


def kv_sources(model) -> list[KVSource]:
    """One ``KVSource`` per decoder layer, in layer order.

    Raises ``DataError`` for an architecture whose attention has neither ``k_proj``/``v_proj`` nor a fused ``c_attn``.
    """
    found = [source for module in model.modules() if (source := _kv_source(module)) is not None]
    layers = model.config.get_text_config().num_hidden_layers
    if len(found) != layers:
        raise DataError(
            f"{type(model).__name__}: found the key and value projections of {len(found)} of {layers} layers. "
            "Supported are decoders with k_proj and v_proj (Llama, Mistral, Gemma, Qwen2, Qwen3, ...) and GPT-2."
        )
    return sorted(found, key=lambda source: source.layer_idx)


def projection_weight(source: KVSource, role: str) -> torch.Tensor:
    """The weight that makes a layer's ``"key"`` or ``"value"`` from its hidden states: (KV width, hidden size)."""
    module = getattr(source.attention, {"key": "k_proj", "value": "v_proj"}[role], source.key_module)
    weight = module.weight.detach().float()
    part = source.key_part if role == "key" else source.value_part
    return (weight.T if isinstance(module, Conv1D) else weight).chunk(source.num_parts)[part]


def condition_number(weight: torch.Tensor) -> float:
    """Largest over smallest singular value, also of a matrix that is not square; infinity for one without full rank."""
    values = torch.linalg.svdvals(weight.double())
    return (values[0] / values[-1]).item()


def rotary_embedding(model) -> nn.Module | None:
    """The module that makes RoPE's cos and sin, or None where positions are learned (GPT-2)."""
    found = [module for name, module in model.named_modules() if name.split(".")[-1].startswith("rotary_emb")]
    if len(found) > 1:
        raise DataError(
            f"{type(model).__name__} has {len(found)} rotary embeddings (one for each kind of layer); "
            "pre-RoPE storage supports one. Models with local and global RoPE are not supported yet."
        )
    return found[0] if found else None


def position_rotary(model) -> nn.Module | None:
    """``rotary_embedding`` whose angles depend on the position alone. Raises ``DataError`` for one whose angles change
    with the length, or with the kind of layer (Gemma 3): keys stored before it could not be rotated back."""
    rotary = rotary_embedding(model)
    if "layer_type" in inspect.signature(getattr(rotary, "forward", lambda: None)).parameters:
        reason = f"{type(rotary).__name__} has angles for each kind of layer"
    elif getattr(rotary, "rope_type", "default") in CHANGING_ROPE:
        reason = f"rope_type {rotary.rope_type!r} changes its angles with the length"
    else:
        return rotary
    raise DataError(f"{reason}, so keys cannot be stored before RoPE: use a preset with pre_rope=False")


def fingerprint(model) -> str:
    """Sixteen hex digits that name the key and value weights as they were loaded (another dtype, another name)."""
    sample = str([describe(model)["weights"], str(model.dtype)])
    return hashlib.sha256(sample.encode()).hexdigest()[:16]


def describe(model) -> dict:
    """Facts by which a compressor knows the model that it was fitted to; see ``difference``. ``weights`` is a sample of
    each layer's key and value weights, the same in fp32, fp16 and bf16 up to rounding."""
    sources = kv_sources(model)
    return {
        "name": getattr(model, "vqkv_name", model.config.name_or_path or type(model).__name__),
        "model_type": model.config.model_type,
        "num_layers": len(sources),
        "num_kv_heads": sources[0].num_kv_heads,
        "head_dim": sources[0].head_dim,
        "weights": [
            sample
            for source in sources
            for module in dict.fromkeys((*_key_modules(source), source.value_module))
            for sample in _samples(module)
        ],
    }


def layer_devices(model) -> list[torch.device]:
    """Devices that make each layer's keys and values; weights that wait in main memory or on a disk are elsewhere."""
    found = []
    for source in kv_sources(model):
        hook = getattr(source.value_module, "_hf_hook", None)
        device = getattr(hook, "execution_device", None)
        found.append(next(source.value_module.parameters()).device if device is None else torch.device(device))
    return found


def difference(fitted: dict, model) -> str | None:
    """The first thing in which ``model`` is not what ``describe`` gave as ``fitted``, or None."""
    here = describe(model)
    for key in ("model_type", "num_layers", "num_kv_heads", "head_dim"):
        if fitted[key] != here[key]:
            return f"{key} {fitted[key]!r}, not {here[key]!r}"
    if len(fitted["weights"]) != len(here["weights"]):
        return "other key or value weights"
    for ours, theirs in zip(fitted["weights"], here["weights"], strict=True):
        ours, theirs = torch.tensor(ours), torch.tensor(theirs)
        # NaN fails every comparison, and infinity the last
        if ours.shape != theirs.shape or not (ours - theirs).abs().max() <= ROUNDING * ours.abs().max() < torch.inf:
            return "other key or value weights"
    return None


def _key_modules(source: KVSource) -> tuple[nn.Module, ...]:
    """What makes a layer's keys: a projection and, in some architectures, a norm after it."""
    return getattr(source.attention, "k_proj", source.key_module), source.key_module


def _samples(module: nn.Module) -> list[list[float]]:
    """Of each of its parameters."""
    with _fetched(module):
        flat = [parameter.detach().flatten() for parameter in module.parameters()]
        parts = [x[:: max(1, x.numel() // 16)][:16].float().tolist() for x in flat]
    return [[float(f"{x:.5g}") for x in part] for part in parts]


def _fetched(module: nn.Module):
    """A context in which the module's own weights are here, also those that a device map keeps elsewhere."""
    if not hasattr(module, "_hf_hook"):
        return nullcontext()
    from accelerate.utils import align_module_device

    return align_module_device(module)


def _kv_source(module: nn.Module) -> KVSource | None:
    if isinstance(getattr(module, "k_proj", None), nn.Module) and isinstance(
        getattr(module, "v_proj", None), nn.Module
    ):
        if not hasattr(module, "layer_idx") or not hasattr(module, "head_dim"):
            return None
        head_dim = module.head_dim
        key = getattr(module, "k_norm", None) or module.k_proj
        width = module.v_proj.weight.shape[0]
        return KVSource(module.layer_idx, module, key, module.v_proj, width // head_dim, head_dim)
    fused = getattr(module, "c_attn", None)
    if isinstance(fused, nn.Module) and not getattr(module, "is_cross_attention", False):
        return KVSource(module.layer_idx, module, fused, fused, module.num_heads, module.head_dim, 1, 2, 3)
    return None
