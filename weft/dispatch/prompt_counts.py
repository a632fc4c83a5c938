"""The length of prompts in tokens, as engines count them: learned for each target from requests that ended.

An estimate by characters knows neither the template, which adds tokens to each prompt, nor the tokenizer. Engines count
each prompt, so a line through their latest counts corrects the next estimates. Pure.
"""

from collections import OrderedDict
from dataclasses import dataclass

from weft.api.common.v1 import chat_pb2
from weft.dispatch.payload_description import Payload

MAX_TARGETS = 1000
"""Targets whose counts are remembered; beyond it, the one that was used longest ago is forgotten."""
KEPT_SHARE = 0.9
"""Weight of the earlier counts at each new one: about the last twenty decide."""
MIN_SLOPE, MAX_SLOPE = 0.25, 8.0
"""Bounds of engine tokens per estimated one: texts of one token per character have 4."""
MIN_SPREAD = 16.0
"""Variance of estimates, in squared tokens, below which they do not tell slope from overhead."""
MAX_OVERHEAD_TOKENS = 100_000
MAX_EXTRAPOLATION = 2.0
"""Multiple of the longest counted prompt up to which the line holds; tokens beyond it count as estimated.

Routers refuse prompts by this length, and a line through short prompts would exclude long ones that fit.
"""


@dataclass(slots=True)
class _Counts:
    """Decayed sums of estimates (x) and counts (y)."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    longest: float = 0.0
    """The largest estimate, not decayed."""

    def add(self, x: float, y: float) -> None:
        kept = KEPT_SHARE
        self.weight = self.weight * kept + 1.0
        self.x, self.y = self.x * kept + x, self.y * kept + y
        self.xx, self.xy = self.xx * kept + x * x, self.xy * kept + x * y
        self.longest = max(self.longest, x)

    def line(self) -> tuple[float, float]:
        """Returns the overhead in tokens and the slope."""
        x, y = self.x / self.weight, self.y / self.weight
        spread = self.xx / self.weight - x * x
        slope = (self.xy / self.weight - x * y) / spread if spread >= MIN_SPREAD else 1.0
        slope = min(max(slope, MIN_SLOPE), MAX_SLOPE)
        if y < x * slope:
            # Less than nothing is no overhead: the texts have more characters per token.
            return 0.0, max(y / x, MIN_SLOPE)
        return min(y - x * slope, MAX_OVERHEAD_TOKENS), slope


class PromptCounts:
    """Corrects estimates of prompts by the engines' counts."""

    def __init__(self) -> None:
        self._targets: OrderedDict[str, _Counts] = OrderedDict()

    def expected(self, target: str, estimated: int) -> int:
        """Returns the tokens that an engine will probably count for a prompt of this estimated length."""
        counts = self._targets.get(target)
        if counts is None or estimated <= 0:
            return estimated
        overhead, slope = counts.line()
        known = min(float(estimated), counts.longest * MAX_EXTRAPOLATION)
        return max(1, round(overhead + slope * known + (estimated - known)))

    def expected_of(self, payload: Payload, target: str, estimated: int) -> int:
        """Returns the expected length of a payload's prompt. Only chats have a template, and are learned from."""
        return self.expected(target, estimated) if isinstance(payload, chat_pb2.ChatPayload) else estimated

    def note(self, target: str, estimated: int, counted: int) -> None:
        """Records an engine's count of a prompt; both must be positive."""
        if estimated <= 0 or counted <= 0:
            return
        self._targets.setdefault(target, _Counts()).add(estimated, counted)
        self._targets.move_to_end(target)
        if len(self._targets) > MAX_TARGETS:
            self._targets.popitem(last=False)
