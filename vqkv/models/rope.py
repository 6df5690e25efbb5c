"""How the layers of a model rotate their keys: RoPE of any layout, from keys of the same tokens at some positions."""

import inspect
import math
import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

from vqkv.errors import DataError
from vqkv.kernels.rope import rotate, unrotate
from vqkv.models.layers import evaluating, forward, kv_layers, max_positions, plain

TOKENS = 64  # one-token sequences that are asked for their keys at each position
LONGEST = 1 << 17  # position that is asked for
CHECKED = (3, 77, 1001)  # positions at which a rotation is checked
NOISE = {2: 2**-6, 4: 2**-18, 8: 2**-18}  # by bytes of a number: share of its pair by which a channel may be off
REMEDY = "so they cannot be stored before RoPE: use pre_rope=False"

_rotations: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # model -> by dtype and block, once they were asked


class Rotation(nn.Module):
    """Channels ``first[i]`` and ``second[i]`` of each head rotate by ``position * angle[i]`` (radians, float64); the
    others do not. A factor that scales keys at all positions alike (YaRN) is not undone. ``half_split``: channel i
    rotates with channel i + rotary_dim / 2, as kernels expect. ``block``: a position counts as its block's first."""

    def __init__(self, first: Tensor, second: Tensor, angle: Tensor, head_dim: int, block: int = 1):
        super().__init__()
        self.first, self.second, self.angle, self.block = first, second, angle, block
        rotated = torch.cat([first, second])
        rest = torch.ones(head_dim, dtype=torch.bool)
        rest[rotated] = False
        self.order = torch.cat([rotated, rest.nonzero()[:, 0]])
        self.half_split = torch.equal(rotated, torch.arange(len(rotated)))

    def table(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, fp32 (rows, seq_len, rotated channels), of integer positions (rows, seq_len). Angles are
        float64 up to full turns, as positions beyond 2^16 leave fp32 too few bits."""
        positions = positions - positions % self.block
        angles = positions.double().unsqueeze(-1) * self.angle.to(positions.device)
        angles = angles.remainder(2 * math.pi).float()
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()

    def with_kernel(self, kernel: Callable[..., Tensor], keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply ``rotate`` or ``unrotate`` to keys (batch, num_kv_heads, seq_len, head_dim) by rows of ``table``."""
        if self.half_split:
            return kernel(keys, cos, sin)
        order = self.order.to(keys.device)
        return kernel(keys[..., order], cos, sin)[..., order.argsort()]

    def rotated(self, keys: Tensor, start: int = 0, back: bool = False) -> Tensor:
        """Rotate keys of the positions start, start + 1, ..., or rotate them ``back``."""
        positions = torch.arange(start, start + keys.shape[2], device=keys.device)[None]
        return self.with_kernel(unrotate if back else rotate, keys, *self.table(positions))


def rotations(model, block: int = 1) -> list[Rotation | None]:
    """Find how each layer rotates its keys by their position, None where it does not. ``block``: by the position of the
    first of their block of so many tokens. Raises ``DataError`` for angles that are not multiples of the position."""
    model = plain(model)
    cached = _rotations.setdefault(model, {})  # a cast may round the model's angles
    if (model.dtype, 1) not in cached:
        cached[model.dtype, 1] = _ask(evaluating(model))
    if (model.dtype, block) not in cached:
        in_blocks = {x: x and Rotation(x.first, x.second, x.angle, len(x.order), block) for x in cached[model.dtype, 1]}
        cached[model.dtype, block] = [in_blocks[each] for each in cached[model.dtype, 1]]  # layers share them
    return cached[model.dtype, block]


def rotates(model) -> bool:
    """Tell whether some layer rotates its keys by their position."""
    model = evaluating(model)
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    return any(_pairs({0: still, 1: moved}) for still, moved in zip(_keys_at(model, 0), _keys_at(model, 1)))


@torch.inference_mode(False)  # gradients pass through them
def _ask(model) -> list[Rotation | None]:
    layers, name = kv_layers(model), type(model).__name__
    if not rotates(model):
        return [None] * len(layers)
    rope = str(getattr(model.config.get_text_config(decoder=True), "rope_parameters", None))
    if changing := [kind for kind in ("dynamic", "longrope") if kind in rope]:
        raise DataError(f"{name}: rope_type {changing[0]!r} has angles that change with the length, {REMEDY}")
    if any(hasattr(module, "get_rope_index") for module in model.modules()):
        raise DataError(f"{name} rotates the keys of images by several positions a token, {REMEDY}")
    longest = min(LONGEST, max_positions(model))
    at = {p: _keys_at(model, p) for p in [0, *(2**i for i in range(20)), *CHECKED] if p < longest}
    by_layer = [{position: keys[i] for position, keys in at.items()} for i in range(len(layers))]
    rotations = [_rotation(keys) for keys in by_layer]
    fitting = [each for each, keys in zip(rotations, by_layer) if each and _fits(each, keys)]
    fitting.sort(key=lambda rotation: -len(rotation.first))
    for index, (own, keys) in enumerate(zip(rotations, by_layer)):
        rotations[index] = next((each for each in fitting if _fits(each, keys)), own)  # biases hide a layer's pairs
        if own is not None and rotations[index] not in fitting:
            raise DataError(f"layer {index} of {name} rotates its keys unevenly, {REMEDY}")
    return rotations


def _keys_at(model, position: int) -> list[Tensor]:
    """Compute keys (tokens, num_kv_heads, head_dim) of each layer, of the same one-token sequences at ``position``."""
    vocab_size = model.get_input_embeddings().weight.shape[0]
    tokens = torch.linspace(0, vocab_size - 1, TOKENS).long()[:, None]
    positions = torch.full_like(tokens, position, device=model.device)
    keys_of: dict[int, Tensor] = {}
    forward(model, tokens, lambda i, keys, _: keys_of.update({i: keys[:, :, 0]}), position_ids=positions)
    return [keys_of[i] for i in sorted(keys_of)]


def _rotation(keys_at: dict[int, Tensor]) -> Rotation | None:
    """Find the rotation by which keys at position 0 become others: position -> (tokens, num_kv_heads, head_dim)
    for 0, powers of two and any others. None where keys do not rotate, or change otherwise (learned positions)."""
    if (pairs := _pairs(keys_at)) is None:
        return None
    first, second = pairs
    half = int(second[0] - first[0])
    if (second - first == half).all() and first.max() < half:  # with those between, which rotate too slowly to be seen
        first = torch.arange(half)
        second = first + half
    keys = {position: x.double().cpu() for position, x in keys_at.items()}
    before = torch.complex(keys[0][..., first], keys[0][..., second])
    angle = torch.zeros(len(first), dtype=torch.float64)
    for position in sorted(p for p in keys if p and p & (p - 1) == 0):  # 1, 2, 4, ...: each halves the error
        after = torch.complex(keys[position][..., first], keys[position][..., second])
        measured = (after * before.conj()).sum(dim=(0, 1)).angle()  # in the middle of all tokens and heads
        missing = (measured - position * angle + math.pi).remainder(2 * math.pi) - math.pi
        angle += missing / position
    return Rotation(first, second, angle, keys_at[0].shape[-1])


def _pairs(keys_at: dict[int, Tensor]) -> tuple[Tensor, Tensor] | None:
    """Find channels that rotate together: what one gains in energy, the other loses, for every token and position.
    Changes are compared with the energy of the channels themselves: next to a large bias others would seem still."""
    noise = NOISE[keys_at[0].element_size()]
    still, *moved = (x.double().cpu() for _, x in sorted(keys_at.items()))
    energy = still.square().mean(dim=(0, 1))
    gains = torch.cat([(x.square() - still.square()).flatten(0, 1) for x in moved])
    gram = gains.T @ gains / len(gains)
    own = gram.diagonal()
    left = (own[:, None] + own[None] + 2 * gram).fill_diagonal_(torch.inf)
    here, partner = torch.arange(len(own)), left.argmin(dim=1)
    rotating = own > (noise * torch.maximum(energy, energy[partner])).square()
    rotating &= (left[here, partner] < 0.5 * own) & (partner[partner] == here)  # strangers leave twice their own gains
    rotating &= rotating[partner]
    changing = own > (noise * energy).square()
    if not rotating.any() or rotating.sum() < 0.5 * changing.sum():
        return None
    lower = here[rotating & (here < partner)]
    return lower, partner[lower]


def _fits(rotation: Rotation, keys_at: dict[int, Tensor]) -> bool:
    """Tell whether the keys at position 0 become all others, to the precision of their dtype: errors are shares of the
    largest key in a pair of channels."""
    noise = NOISE[keys_at[0].element_size()]  # the model's own angles are products in fp32
    if len(rotation.order) != keys_at[0].shape[-1]:
        return False
    still, first, second = keys_at[0].double().cpu()[:, :, None], rotation.first, rotation.second
    for position, moved in keys_at.items():
        moved, (cos, sin) = moved.double().cpu(), rotation.table(torch.tensor([[position]]))
        expected = rotation.with_kernel(rotate, still, cos.double(), sin.double())[:, :, 0]
        missed = (expected - moved).abs().amax(dim=(0, 1))
        largest = moved.abs().amax(dim=(0, 1))
        largest[first] = largest[second] = torch.maximum(largest[first], largest[second])
        share = (missed / largest.clamp_min(torch.finfo(torch.float64).tiny)).max().item()
        if not share <= 16 * noise + position * 2**-23:
            return False
    return True
