"""RoPE of any layout, found by asking the model: the same token at another position, layer by layer."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from vqkv.kernels.rope import rotate, unrotate

NOISE = {2: 2**-6, 4: 2**-18, 8: 2**-18}  # by bytes of a number: share of the largest key by which a turn may be missed


class Rotation(nn.Module):
    """Channels ``first[i]`` and ``second[i]`` of each head turn by ``position * angle[i]`` (radians, float64); the
    others do not. A factor that scales keys at all positions alike (YaRN) is not undone. ``llama``: channel i turns
    with channel i + rotary_dim / 2, as kernels that rotate expect."""

    def __init__(self, first: Tensor, second: Tensor, angle: Tensor, head_dim: int):
        super().__init__()
        self.first, self.second, self.angle = first, second, angle
        turned = torch.cat([first, second])
        rest = torch.ones(head_dim, dtype=torch.bool)
        rest[turned] = False
        self.order = torch.cat([turned, rest.nonzero()[:, 0]])
        self.llama = torch.equal(turned, torch.arange(len(turned)))

    def like(self, other: "Rotation") -> bool:
        """True if it turns the same channels by the same angles, up to how well these can be known."""
        alike = torch.equal(self.first, other.first) and torch.equal(self.second, other.second)
        return alike and torch.allclose(self.angle, other.angle, rtol=1e-4, atol=1e-7)

    def table(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, fp32 (rows, seq_len, turned channels), of integer positions (rows, seq_len). Angles are float64
        up to whole turns, as positions beyond 2^16 leave fp32 too few bits."""
        angles = positions.double().unsqueeze(-1) * self.angle.to(positions.device)
        angles = angles.remainder(2 * math.pi).float()
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()

    def turn(self, how: Callable[..., Tensor], keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``rotate`` or ``unrotate`` (kernels.rope) keys (batch, num_kv_heads, seq_len, head_dim) by rows of
        ``table``."""
        if self.llama:
            return how(keys, cos, sin)
        order = self.order.to(keys.device)
        return how(keys[..., order], cos, sin)[..., order.argsort()]

    def turned(self, keys: Tensor, start: int = 0, back: bool = False) -> Tensor:
        """Keys of the positions start, start + 1, ..., rotated, or rotated ``back``."""
        positions = torch.arange(start, start + keys.shape[2], device=keys.device)[None]
        return self.turn(unrotate if back else rotate, keys, *self.table(positions))


class AnglesChangeError(ValueError):
    """Keys turn, but not by an angle that grows with the position."""


def found_rotation(keys_at: dict[int, Tensor]) -> Rotation | None:
    """The rotation that makes of the keys at position 0 those at others: position -> (tokens, num_kv_heads, head_dim)
    for 0, powers of two and, to check what was found, any others. None where keys do not turn, or change with the
    position in another way (learned positions). Raises ``AnglesChangeError`` if they turn, but unevenly."""
    keys = {position: x.double().cpu() for position, x in keys_at.items()}
    still = keys.pop(0)
    noise = NOISE[keys_at[0].element_size()]
    pairs = _pairs(still, [*keys.values()], noise)
    if pairs is None:
        return None
    first, second = pairs
    angle = torch.zeros(len(first), dtype=torch.float64)
    for position in sorted(p for p in keys if p & (p - 1) == 0):  # 1, 2, 4, ...: each halves the error of the last
        seen = _angles(still, keys[position], first, second)
        missing = (seen - position * angle + math.pi).remainder(2 * math.pi) - math.pi
        angle += missing / position
    rotation = Rotation(first, second, angle, still.shape[-1])
    for position, x in keys.items():  # the model's own angles are products in fp32
        if _miss(rotation, still, x, position) > 16 * noise + position * 2**-23:
            raise AnglesChangeError
    return rotation


def _pairs(still: Tensor, moved: list[Tensor], noise: float) -> tuple[Tensor, Tensor] | None:
    """Channels that turn together: what one gains in energy, the other loses, for every token and position."""
    gains = torch.cat([(x.square() - still.square()).flatten(0, 1) for x in moved]) / still.square().mean()
    gram = gains.T @ gains / len(gains)
    own = gram.diagonal()
    turning = (own > noise**2).nonzero()[:, 0]
    if not len(turning):
        return None
    left = (own[:, None] + own[None] + 2 * gram)[turning][:, turning].fill_diagonal_(torch.inf)
    partner, here = left.argmin(dim=1), torch.arange(len(turning))
    if (left[here, partner] > 0.5 * own[turning]).any() or not torch.equal(partner[partner], here):
        return None  # two channels that have nothing to do with each other leave twice their own gains
    lower = here < partner
    return turning[lower], turning[partner[lower]]


def _angles(still: Tensor, moved: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """By which the pairs have turned, in the middle of all tokens and heads."""
    before, after = (torch.complex(x[..., first], x[..., second]) for x in (still, moved))
    return (after * before.conj()).sum(dim=(0, 1)).angle()


def _miss(rotation: Rotation, still: Tensor, moved: Tensor, position: int) -> float:
    table = rotation.table(torch.tensor([[position]]))
    turned = rotation.turn(rotate, still[:, :, None], *(part.double() for part in table))
    return ((turned[:, :, 0] - moved).abs().max() / moved.abs().max()).item()
