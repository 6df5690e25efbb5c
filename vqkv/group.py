"""Sequences of a batch that hold equally many tokens: what every layer stores of them, and where those tokens are."""

from dataclasses import dataclass, field

from torch import Tensor

from vqkv.coder import Known
from vqkv.packed_attention import Stored
from vqkv.positions import Positions
from vqkv.precision import full_precision
from vqkv.role import Role, Settings

Pair = tuple[Role, Role]


@dataclass(eq=False)
class Group:
    """``rows`` are the sequences' places in the batch; ``roles`` their keys and values by layer.

    ``past`` and ``fresh`` are what the layers tell each other in one forward pass, so that no history is decoded twice:
    reconstructions of the tokens that were packed before, and of those that are packed now. Empty between passes.
    """

    rows: list[int]
    roles: list[Pair]
    positions: Positions
    settings: Settings
    last_readers: dict
    past: Known = field(init=False)
    fresh: Known = field(init=False)

    def __post_init__(self):
        self.begin()

    def begin(self) -> None:
        """Forget the pass before."""
        self.past, self.fresh = Known(self.last_readers), Known(self.last_readers)

    def end(self) -> None:
        """Forget what served one forward pass."""
        self.positions.done()
        self.begin()

    def at(self, layer: int) -> Positions:
        """The positions of the tokens that ``layer`` stores."""
        return self.positions

    def update(self, layer: int, keys: Tensor, values: Tensor, room: int) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys (after RoPE) and values (sequences, num_kv_heads, new_tokens, head_dim); return what
        attention reads: decoded history and, unless ``in_place``, the new tokens as they came."""
        (key, value), positions = self.roles[layer], self.at(layer)
        with full_precision(keys.device):
            return self._pass(key, keys, positions, room), self._pass(value, values, positions, room)

    def stored(self, layer: int, keys: Tensor, values: Tensor) -> Stored | None:
        """What attention reads, ``keys`` and ``values`` (as in ``update``) included, if it can read packed tokens as
        they are; None if they must be decoded for it. ``write`` then stores the new ones."""
        (key, value), positions = self.roles[layer], self.at(layer)
        if self.settings.in_place:
            return None  # attention is to read the new tokens packed, too
        sinks = key.parts[0]
        turned = key.rotated and positions.rotary is not None
        rope = positions.rope(sinks) if turned else None
        packed = key.readable(self.past), value.readable(self.past)
        if None in packed or (turned and rope is None):
            return None
        return Stored(*packed, rope, key.exact(keys), value.exact(values), sinks)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store a layer's new keys and values."""
        with full_precision(keys.device):
            for role, states in zip(self.roles[layer], (keys, values), strict=True):
                role.write(states, self.at(layer), self.settings, self.fresh)

    def _pass(self, role: Role, states: Tensor, positions: Positions, room: int) -> Tensor:
        if self.settings.in_place:
            role.write(states, positions, self.settings, self.fresh)
            return role.all(states, positions, self.past, room)
        out = role.all(states, positions, self.past, room, states.shape[-2])
        out.narrow(2, out.shape[2] - states.shape[2], states.shape[2]).copy_(states)
        role.write(states, positions, self.settings, self.fresh)
        return out

    def intact(self, layer: int) -> bool:
        """Whether keys and values hold the tokens whose positions are known: not so after a write that failed."""
        return all(sum(role.parts) == self.positions.seq_len for role in self.roles[layer])

    def truncate(self, seq_len: int) -> None:
        """Keep the first ``seq_len`` tokens."""
        for role in (role for pair in self.roles for role in pair):
            role.truncate(seq_len, self.settings)
        self.positions.truncate(seq_len)

    def trim(self, room: int) -> None:
        """Forget decoded tokens beyond the first ``room`` packed ones."""
        for role in (role for pair in self.roles for role in pair):
            role.trim(room)

    def select(self, index: Tensor, rows: list[int]) -> "Group":
        """A copy with its sequences ``index``, which become ``rows`` of the batch."""
        roles = [tuple(role.select(index) for role in pair) for pair in self.roles]
        return self.twin(rows, roles, self.positions.select(index))

    def twin(self, rows: list[int], roles: list[Pair], positions: Positions) -> "Group":
        """A group of the same kind that stores something else."""
        return type(self)(rows, roles, positions, self.settings, self.last_readers)
