"""A cache on disk: what it stores of its tokens and what it was made for, in one checked safetensors file.

The file's metadata has two entries. ``vqkv-cache`` is a JSON header: format and version; names and fingerprints of the
compressor and the model; the batch; of each group its sequences and how many of their tokens are sinks, packed and
window; the sha256 of all tensors (names, types, shapes, bytes). ``sha256`` is the header's own, so that nothing that
counts can change unseen. The tensors are those that ``vqkv.saved_state`` names, and their bytes the ones that
``CompressedCache.report`` counts, decoded tokens apart.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vqkv.cache import CompressedCache
from vqkv.codec.part import ALTERED
from vqkv.compressor import Compressor
from vqkv.compressor_folder import check_types
from vqkv.errors import DataError, FormatError
from vqkv.files import raw_bytes, replacing, tensors_sha256
from vqkv.meter import Report
from vqkv.models import describe, fingerprint
from vqkv.saved_state import GROUP, about_group, check_groups, counts_of, fill, read_back, tensors_of
from vqkv.snapshot_forms import dtype_name

FORMAT, VERSION = "vqkv-cache", 1
HEADER = {"format": str, "version": int, "compressor": dict, "model": dict, "in_place": bool, "batch_size": int,
          "slots": int, "groups": list, "tensors_sha256": str}  # fmt: skip
COMPRESSOR = {"name": str, "fingerprint": str, "side_bytes": int}
MODEL = {"name": str, "model_type": str, "num_layers": int, "num_kv_heads": int, "head_dim": int, "dtype": str,
         "rope_parameters": str, "weights": str}  # fmt: skip
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8, "I8": torch.int8,
          "I16": torch.int16, "I32": torch.int32, "I64": torch.int64}  # fmt: skip
HEADER_ROOM = 1 << 16  # bytes that the JSON header may take in however small a file
MOST = 1 << 40  # of any number in it
DIGITS = 16  # of a fingerprint, in messages
NOT_ITS_TENSORS = "its tensors are not those that its header was written for"


def save(cache: CompressedCache, path) -> None:
    """See ``CompressedCache.save``."""
    path = Path(path)
    if path.is_dir():
        raise FormatError(f"{path} is a folder: name a file for the cache")
    _check_kind(type(cache))
    cache._check_intact()
    if (model := cache.model()) is None:
        raise DataError("the model that this cache was made for is gone: keep it until the cache is saved")
    tensors = dict(sorted(tensors_of(cache)))
    header = {
        "format": FORMAT,
        "version": VERSION,
        "compressor": _about_compressor(cache.compressor),
        "model": _about_model(model),
        "in_place": cache.settings.in_place,
        "batch_size": cache.batch.size,
        "slots": cache.batch.slots,
        "groups": [about_group(group) for group in cache.batch.groups],
        "tensors_sha256": tensors_sha256(tensors.items()),
    }
    text = json.dumps(header)
    _write(path, tensors, {FORMAT: text, "sha256": _sha256(text)})


def load(kind: type, path, compressor: Compressor, model, decoded_cache_bytes: int = 0) -> CompressedCache:
    """See ``CompressedCache.load``; ``kind`` is the class that it was called on."""
    _check_kind(kind)
    if not isinstance(compressor, Compressor):
        raise DataError(f"a {type(compressor).__name__} is no Compressor: pass the one that the cache was made with")
    with _opened(path) as file:
        header = _read_header(file, path)
        _check_made_for(header, path, compressor, model)
        cache = CompressedCache(compressor, model, header["in_place"], decoded_cache_bytes)
        tensors = dict(_read_tensors(file))
    if tensors_sha256(tensors.items()) != header["tensors_sha256"]:
        raise FormatError(f"{path} was altered: {NOT_ITS_TENSORS}")
    try:
        fill(cache, header, tensors)
        read_back(cache)
    except torch.OutOfMemoryError:
        raise
    except ALTERED as error:
        raise FormatError(f"{path} was altered: {error}") from error
    return cache


def inspect(path) -> dict:
    """What a saved cache holds and what it was made for, with no need of either: its header and ``Report.as_dict()``.
    Every checksum is verified. Raises ``FormatError`` for anything but a whole saved cache."""
    sizes = Counter()

    def measured(tensors):
        for name, tensor in tensors:
            sizes[name] = len(raw_bytes(tensor))
            yield name, tensor

    with _opened(path) as file:
        header = _read_header(file, path)
        if tensors_sha256(measured(_read_tensors(file))) != header["tensors_sha256"]:
            raise FormatError(f"{path} was altered: {NOT_ITS_TENSORS}")
    about = {key: header[key] for key in ("format", "version", "compressor", "model", "in_place")}
    about["groups"] = [{"sequences": len(group["rows"]), **counts_of(group)} for group in header["groups"]]
    file_bytes = Path(path).stat().st_size
    about |= {"file_bytes": file_bytes, "header_bytes": file_bytes - sum(sizes.values())}
    return about | _report(header, sizes).as_dict()


def _check_kind(kind: type) -> None:
    if kind is not CompressedCache:
        raise DataError(
            f"an {kind.__name__} keeps more than a saved cache has a place for: save and load caches made by "
            "Compressor.new_cache"
        )


def _about_compressor(compressor: Compressor) -> dict:
    about = {"name": compressor.name, "fingerprint": compressor.fingerprint}
    return about | {"side_bytes": compressor.side_bytes}


def _about_model(model) -> dict:
    about = describe(model) | {"weights": fingerprint(model), "dtype": dtype_name(model.dtype)}
    rope = getattr(model.config.get_text_config(), "rope_parameters", None)  # sinks and window are stored after RoPE
    about["rope_parameters"] = json.dumps(rope, sort_keys=True, default=str)
    return {key: about[key] for key in MODEL}


def _check_made_for(header: dict, path, compressor: Compressor, model) -> None:
    """Raise ``FormatError`` if either is not what the cache was made for: which of them, what it was and what it is."""
    found = []
    was, here = header["compressor"], _about_compressor(compressor)
    if was["fingerprint"] != here["fingerprint"]:
        names = [f"{about['name']!r} ({about['fingerprint'][:DIGITS]})" for about in (was, here)]
        found.append("compressor {}, not {}".format(*names))
    was, here = header["model"], _about_model(model)
    other = next((key for key in MODEL if key != "name" and was[key] != here[key]), None)
    if other:
        names = [f"{about['name']!r} with {other} {about[other]}" for about in (was, here)]
        found.append("model {}, not {}".format(*names))
    if found:
        raise FormatError(f"{path} was saved with {', and with '.join(found)}: load it with what it was saved with")


def _report(header: dict, sizes: dict[str, int]) -> Report:
    """The report of the saved cache, from the header and the bytes of each tensor."""
    kinds = Counter(sinks=0, window=0, decoded=0, positions=0, padding=0)
    for name, size in sizes.items():
        kinds["padding" if name == "tokens" else name.rpartition(".")[2]] += size
    packed_bytes = sum(size for name, size in sizes.items() if ".packed." in name)
    model, packed_values, values = header["model"], 0, 0
    for group in header["groups"]:
        counts = counts_of(group)
        per_token = 2 * model["num_layers"] * len(group["rows"]) * model["num_kv_heads"] * model["head_dim"]
        packed_values += counts["packed"] * per_token
        values += sum(counts.values()) * per_token
    side = header["compressor"]["side_bytes"]
    return Report(dict(kinds), packed_bytes, packed_values, values, header["slots"], header["batch_size"], side)


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """As safetensors' ``save_file``, but with an ``OSError`` for a full disk and one tensor at a time in CPU memory."""
    codes = {dtype: code for code, dtype in DTYPES.items()}
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so that all are aligned
    described, end = {"__metadata__": metadata}, 0
    for name in order:
        x, start = tensors[name], end
        end = start + x.numel() * x.element_size()
        described[name] = {"dtype": codes[x.dtype], "shape": list(x.shape), "data_offsets": [start, end]}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(raw_bytes(tensors[name]))


@contextmanager
def _opened(path):
    if not Path(path).is_file():
        raise FormatError(f"{path} is no file: save a cache with cache.save(...)")
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise FormatError(f"{path} is no saved cache, or was cut or altered: {error}") from error


def _read_tensors(file) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in the order of the names: a copy, as the file's own pages would change with the file."""
    for name in sorted(file.keys()):
        if file.get_slice(name).get_dtype() not in DTYPES:
            raise FormatError(f"tensor {name!r} is of a type that no cache stores: the file was altered")
        yield name, file.get_tensor(name).clone()


def _read_header(file, path) -> dict:
    """The header, every field of it checked. Raises ``FormatError``."""
    metadata, room = file.metadata() or {}, max(HEADER_ROOM, Path(path).stat().st_size // 8)
    if FORMAT not in metadata:
        raise FormatError(f"{path} is a safetensors file, but no saved cache: save one with cache.save(...)")
    text = metadata[FORMAT]
    try:
        if len(text) > room or set(metadata) != {FORMAT, "sha256"}:
            raise FormatError(f"metadata {sorted(metadata)[:5]}, of them a header of {len(text)} bytes")
        header = json.loads(text)
        if header["format"] != FORMAT or type(header["version"]) is not int or header["version"] != VERSION:
            raise FormatError(f"{header['format']!r} {header['version']!r}; this vqkv reads {FORMAT!r} {VERSION}")
        if metadata["sha256"] != _sha256(text):
            raise FormatError("its header does not match its sha256")
        _check_header(header)
    except (RecursionError, *ALTERED) as error:
        raise FormatError(f"{path} is no saved cache of this version, or was altered: {error}") from error
    return header


def _check_header(header: dict) -> None:
    _check_fields("its header", header, HEADER)
    _check_fields("its compressor", header["compressor"], COMPRESSOR)
    _check_fields("its model", header["model"], MODEL)
    for group in header["groups"]:
        _check_fields("a group", group, GROUP)
    check_groups(header)


def _check_fields(what: str, found: dict, types: dict[str, type]) -> None:
    """Raise ``FormatError`` unless ``found`` has just the keys of ``types``, of these types, and no absurd number."""
    check_types(what, found, types)
    for key, kind in types.items():
        if kind is int and not 0 <= found[key] <= MOST:
            raise FormatError(f"{what}: {key} {found[key]} is no number from 0 to {MOST}")
    if len(found) > len(types):
        raise FormatError(f"{what} has more than {sorted(types)}")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
