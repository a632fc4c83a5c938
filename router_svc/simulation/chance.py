"""Chance that replays: numbers drawn from a seed and a purpose."""

import math
from dataclasses import dataclass
from random import Random


def chance(seed: int, purpose: str) -> Random:
    """A source of its own for each purpose, so that drawing more for one changes nothing for another."""
    return Random(f"{seed}/{purpose}")  # noqa: S311 - a simulation, nothing secret


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """How much of something: log-normal around a mean, because lengths and times of language models are skewed so."""

    mean: float
    variation: float = 0.0
    """Standard deviation divided by the mean; 0: always the mean."""
    lowest: float = 0.0
    highest: float = math.inf

    def draw(self, random: Random) -> float:
        """One value."""
        if not self.variation or not self.mean:
            return min(max(self.mean, self.lowest), self.highest)
        sigma_squared = math.log1p(self.variation**2)
        value = random.lognormvariate(math.log(self.mean) - sigma_squared / 2, math.sqrt(sigma_squared))
        return min(max(value, self.lowest), self.highest)

    def draw_count(self, random: Random) -> int:
        """One value as a whole number."""
        return round(self.draw(random))

    @property
    def largest_likely(self) -> float:
        """What nearly all values stay under: the mean and five standard deviations, or the bound."""
        return min(self.mean * (1 + 5 * self.variation), self.highest)
