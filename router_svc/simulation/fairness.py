"""How evenly something scarce was divided."""

from collections.abc import Mapping, Sequence


def jain_index(shares: Sequence[float]) -> float:
    """Jain's index: 1 when all are equal, 1 / n when one has everything (Jain, Chiu, Hawe 1984). 1 for nobody."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def max_min_shares(offered: Mapping[str, float], weights: Mapping[str, float], capacity: float) -> dict[str, float]:
    """Who should get how much: nobody more than was asked for, and what is short divided by weight (water filling)."""
    shares: dict[str, float] = {}
    open_names = sorted(offered, key=lambda name: offered[name] / weights[name])
    left, weight_left = capacity, sum(weights[name] for name in open_names)
    for name in open_names:
        shares[name] = min(offered[name], left * weights[name] / weight_left) if weight_left > 0 else 0.0
        left -= shares[name]
        weight_left -= weights[name]
    return shares
