"""How the layers of a model rotate their keys, asked of the model: the same tokens at several positions."""

import inspect
import weakref
from typing import Literal

import torch
from torch import Tensor

from vqkv.errors import DataError
from vqkv.models.layers import forward, kv_layers, max_positions
from vqkv.models.plain import evaluating, plain
from vqkv.models.rotation import AnglesChangeError, Rotation, fits, found_rotation

CHANGING_ROPE = ("dynamic", "longrope")  # angles that depend on the length
TOKENS = 64  # one-token sequences that are asked for their keys at each position
LONGEST = 1 << 17  # position that is asked for
NOT = "so they cannot be stored before RoPE: use pre_rope=False"
OTHERS = (3, 77, 1001)  # positions at which what was found is checked

_rotations: weakref.WeakKeyDictionary = (
    weakref.WeakKeyDictionary()
)  # model -> by dtype and block theirs, if they were asked for


def rotations(model, block: int = 1) -> list[Rotation | None]:
    """How each layer rotates its keys by their position, None where it does not, from keys of the same tokens at
    several positions. ``block``: by the position of the first of their block of so many tokens. Raises ``DataError``,
    with the remedy, for angles that are not multiples of the position."""
    model = plain(model)
    known = _rotations.setdefault(model, {})  # a cast may round the model's angles
    if (model.dtype, 1) not in known:
        known[model.dtype, 1] = _seen_rotations(evaluating(model))
    if (model.dtype, block) not in known:
        in_blocks = {turn: turn and turn.by_block(block) for turn in known[model.dtype, 1]}  # layers share them
        known[model.dtype, block] = [in_blocks[turn] for turn in known[model.dtype, 1]]
    return known[model.dtype, block]


def rotates(model) -> bool:
    """True if some layer is known to turn its keys by their position ."""
    model = evaluating(model)
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    at = {position: _keys_at(model, position) for position in (0, 1)}
    return any(_found({p: keys[i] for p, keys in at.items()}) is not None for i in range(len(kv_layers(model))))


@torch.inference_mode(False)  # gradients pass through them
def _seen_rotations(model) -> list[Rotation | None]:
    layers, name = kv_layers(model), type(model).__name__
    if not rotates(model):
        return [None] * len(layers)
    rope = str(getattr(model.config.get_text_config(decoder=True), "rope_parameters", None))
    if changing := [kind for kind in CHANGING_ROPE if kind in rope]:
        raise DataError(f"{name}: rope_type {changing[0]!r} has angles that change with the length, {NOT}")
    if any(hasattr(module, "get_rope_index") for module in model.modules()):
        raise DataError(f"{name} turns the keys of images by several positions a token, {NOT}")
    longest = min(LONGEST, max_positions(model))
    wanted = [0, *(2**i for i in range(20)), *OTHERS]
    at = {position: _keys_at(model, position) for position in wanted if position < longest}
    by_layer = [{position: keys[i] for position, keys in at.items()} for i in range(len(layers))]
    found = [_found(keys) for keys in by_layer]
    # large biases hide pairs of a layer
    known = sorted((each for each in found if each), key=lambda rotation: -len(rotation.first))
    found = [next((each for each in known if fits(each, keys)), own) for keys, own in zip(by_layer, found, strict=True)]
    if False in found:
        raise DataError(f"layer {found.index(False)} of {name} rotates its keys unevenly, {NOT}")
    return [each or None for each in found]


def _found(keys_at: dict[int, Tensor]) -> Rotation | Literal[False] | None:
    """False where keys rotate unevenly."""
    try:
        return found_rotation(keys_at)
    except AnglesChangeError:
        return False


def _keys_at(model, position: int) -> list[Tensor]:
    """(tokens, num_kv_heads, head_dim) of each layer, of the same one-token sequences."""
    words = model.get_input_embeddings().weight.shape[0]
    tokens = torch.linspace(0, words - 1, TOKENS).long()[:, None]
    found: dict[int, Tensor] = {}
    forward(
        model, tokens, lambda i, keys, values: found.update({i: keys[:, :, 0]}),
        position_ids=torch.full_like(tokens, position, device=model.device),
    )  # fmt: skip
    return [found[i] for i in sorted(found)]
