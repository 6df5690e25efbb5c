"""The cheapest split of a budget of bits among places with a curve of costs each."""

from torch import Tensor

from vqkv.codecs.predictive import Place
from vqkv.errors import DataError

BISECTIONS = 60


def allocate(curves: dict[Place, Tensor], budget: float) -> dict[Place, float]:
    """Bits of each place: of its points (n, 2) of bits and cost, the one that keeps the sum of costs lowest with a mean
    of at most ``budget`` bits (Lagrange multipliers on the curves' convex hulls; Shoham & Gersho 1988). Raises
    ``DataError`` if even the fewest bits are too many, and for costs that are no numbers."""
    for place, curve in curves.items():
        if not curve.isfinite().all():
            raise DataError(f"what {place} costs is infinite or NaN: check the model's weights and dtype")
    least = sum(curve[:, 0].min().item() for curve in curves.values()) / len(curves)
    if least > budget:
        raise DataError(f"{budget:g} bits a value, but {least:g} is the least that these codecs take: allow more")

    def choose(price: float) -> dict[Place, float]:
        return {place: curve[(curve[:, 1] + price * curve[:, 0]).argmin(), 0].item() for place, curve in curves.items()}

    low, high = -60.0, 60.0  # of the price's logarithm; the highest buys the fewest bits
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        affordable = sum(choose(2.0**middle).values()) <= budget * len(curves)
        low, high = (low, middle) if affordable else (middle, high)
    return choose(2.0**high)
