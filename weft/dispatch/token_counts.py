"""Counts of tokens: the length of prompts as engines count them, learned for each target, and the tokens of a turn.

An estimate by characters knows neither the template, which adds tokens to each prompt, nor the tokenizer. Engines count
each prompt, so a line through their latest counts corrects the next estimates. Pure.
"""

from collections import OrderedDict
from dataclasses import dataclass

from weft.api.common.v1 import chat_pb2, event_pb2, usage_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft.dispatch.payload_description import Payload, estimated_prompt_tokens
from weft.kernel.requests.request_values import CHARS_PER_TOKEN

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


class TokenCounter:
    """Counts the tokens of a turn by its chunks: engines send one per token. Joined chunks count by length."""

    def __init__(self, payload: GenerationPayload, *, whole: bool, prompt_tokens: int | None = None) -> None:
        """`whole`: the answer is not streamed, so its chunks may have been joined.

        `prompt_tokens`: the expected length of the prompt; None: estimated by its characters.
        """
        self._payload = payload
        self._prompt_tokens = prompt_tokens
        self._whole = whole
        self._progress: event_pb2.Progress | None = None
        self._pieces = 0
        self._chars = 0

    @property
    def has_begun(self) -> bool:
        """Whether the engine has visibly worked on the request."""
        return self._progress is not None or self._pieces > 0

    def note(self, frame: Frame) -> None:
        """Counts another frame of the engine, but not its last one: then the engine has counted the answer."""
        if frame and frame[-1].WhichOneof("event") == "finished":
            return
        for event in frame:
            kind = event.WhichOneof("event")
            if kind == "delta":
                delta = event.delta
                calls = delta.tool_calls
                written = len(delta.text + delta.reasoning + delta.refusal)
                if calls:
                    written += sum(len(call.arguments_text) for call in calls)
                self._pieces += len(delta.piece_lengths) or bool(written or calls)
                self._chars += written
            elif kind == "progress":
                self._progress = event.progress

    @property
    def usage(self) -> usage_pb2.Usage:
        """Returns the counts so far. Prompt tokens are the engine's count if it reported one, else an estimate."""
        progress = self._progress or event_pb2.Progress()
        prompt_tokens = progress.prompt_tokens or self._prompt_tokens
        if prompt_tokens is None:
            prompt_tokens = estimated_prompt_tokens(self._payload)
        joined = int(self._chars / CHARS_PER_TOKEN) if self._whole else 0
        return usage_pb2.Usage(
            prompt_tokens=prompt_tokens,
            cached_prompt_tokens=progress.cached_tokens,
            completion_tokens=max(self._pieces, joined),
            prompt_estimated=not progress.prompt_tokens,
        )
