"""RoPE of any layout, found from the same keys at several positions."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from vqkv.kernels.rope import rotate, unrotate

NOISE = {2: 2**-6, 4: 2**-18, 8: 2**-18}  # by bytes of a number: share of its pair by which a channel may be off


class Rotation(nn.Module):
    """Channels ``first[i]`` and ``second[i]`` of each head rotate by ``position * angle[i]`` (radians, float64); the
    others do not. A factor that scales keys at all positions alike (YaRN) is not undone. ``half_split``: channel i
    turns with channel i + rotary_dim / 2, as kernels that rotate expect. ``block``: positions count as that of the
    first of their block of so many."""

    def __init__(self, first: Tensor, second: Tensor, angle: Tensor, head_dim: int, block: int = 1):
        super().__init__()
        self.first, self.second, self.angle, self.block = first, second, angle, block
        turned = torch.cat([first, second])
        rest = torch.ones(head_dim, dtype=torch.bool)
        rest[turned] = False
        self.order = torch.cat([turned, rest.nonzero()[:, 0]])
        self.half_split = torch.equal(turned, torch.arange(len(turned)))

    def by_block(self, block: int) -> "Rotation":
        """The same in blocks."""
        return Rotation(self.first, self.second, self.angle, len(self.order), block)

    def table(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, fp32 (rows, seq_len, rotated channels), of integer positions (rows, seq_len). Angles are float64
        up to whole turns, as positions beyond 2^16 leave fp32 too few bits."""
        positions = positions - positions % self.block
        angles = positions.double().unsqueeze(-1) * self.angle.to(positions.device)
        angles = angles.remainder(2 * math.pi).float()
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()

    def turn(self, how: Callable[..., Tensor], keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``rotate`` or ``unrotate`` keys (batch, num_kv_heads, seq_len, head_dim) by rows of ``table``."""
        if self.half_split:
            return how(keys, cos, sin)
        order = self.order.to(keys.device)
        return how(keys[..., order], cos, sin)[..., order.argsort()]

    def turned(self, keys: Tensor, start: int = 0, back: bool = False) -> Tensor:
        """Keys of the positions start, start + 1, ..., rotated, or rotated ``back``."""
        positions = torch.arange(start, start + keys.shape[2], device=keys.device)[None]
        return self.turn(unrotate if back else rotate, keys, *self.table(positions))


class AnglesChangeError(ValueError):
    """Keys rotate, but not by an angle that grows with the position."""


def found_rotation(keys_at: dict[int, Tensor]) -> Rotation | None:
    """The rotation that makes of the keys at position 0 those at others: position -> (tokens, num_kv_heads, head_dim)
    for 0, powers of two and, to check what was found, any others. None where keys do not rotate, or change with the
    position in another way (learned positions). Raises ``AnglesChangeError`` if they rotate, but unevenly."""
    keys = {position: x.double().cpu() for position, x in keys_at.items()}
    still = keys.pop(0)
    noise = NOISE[keys_at[0].element_size()]
    pairs = _pairs(still, [*keys.values()], noise)
    if pairs is None:
        return None
    first, second = pairs
    half = int(second[0] - first[0])
    if (second - first == half).all() and first.max() < half:  # with those between, which turn too slowly to be seen
        first = torch.arange(half)
        second = first + half
    angle = torch.zeros(len(first), dtype=torch.float64)
    for position in sorted(p for p in keys if p & (p - 1) == 0):  # 1, 2, 4, ...: each halves the error of the last
        before, after = (torch.complex(x[..., first], x[..., second]) for x in (still, keys[position]))
        seen = (after * before.conj()).sum(dim=(0, 1)).angle()  # in the middle of all tokens and heads
        missing = (seen - position * angle + math.pi).remainder(2 * math.pi) - math.pi
        angle += missing / position
    rotation = Rotation(first, second, angle, still.shape[-1])
    if not fits(rotation, keys_at):
        raise AnglesChangeError
    return rotation


def fits(rotation: Rotation, keys_at: dict[int, Tensor]) -> bool:
    """True if it makes of the keys at position 0 those at all others, to the precision of their dtype."""
    noise = NOISE[keys_at[0].element_size()]  # the model's own angles are products in fp32
    keys = {position: x.double().cpu() for position, x in keys_at.items()}
    alike = len(rotation.order) == keys[0].shape[-1]
    return alike and all(_miss(rotation, keys[0], x, at) <= 16 * noise + at * 2**-23 for at, x in keys.items())


def _pairs(still: Tensor, moved: list[Tensor], noise: float) -> tuple[Tensor, Tensor] | None:
    """Channels that rotate together: what one gains in energy, the other loses, for every token and position. Changes
    are held against the energy of the channels themselves: beside a large bias all others would pass for still."""
    energy = still.square().mean(dim=(0, 1))
    gains = torch.cat([(x.square() - still.square()).flatten(0, 1) for x in moved])
    gram = gains.T @ gains / len(gains)
    own = gram.diagonal()
    left = (own[:, None] + own[None] + 2 * gram).fill_diagonal_(torch.inf)
    here, partner = torch.arange(len(own)), left.argmin(dim=1)
    turning = own > (noise * torch.maximum(energy, energy[partner])).square()
    turning &= (left[here, partner] < 0.5 * own) & (partner[partner] == here)  # strangers leave twice their own gains
    turning &= turning[partner]
    changing = own > (noise * energy).square()
    if not turning.any() or turning.sum() < 0.5 * changing.sum():
        return None
    lower = here[turning & (here < partner)]
    return lower, partner[lower]


def _miss(rotation: Rotation, still: Tensor, moved: Tensor, position: int) -> float:
    """The largest error of what is rotated, as a share of the largest key in its pair of channels."""
    table = rotation.table(torch.tensor([[position]]))
    turned = rotation.turn(rotate, still[:, :, None], *(part.double() for part in table))
    first, second, largest = rotation.first, rotation.second, moved.abs().amax(dim=(0, 1))
    largest[first] = largest[second] = torch.maximum(largest[first], largest[second])
    missed = (turned[:, :, 0] - moved).abs().amax(dim=(0, 1))
    return (missed / largest.clamp_min(torch.finfo(torch.float64).tiny)).max().item()
