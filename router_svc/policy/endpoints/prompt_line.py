"""The prompts that an engine has to process one after the other, in seconds."""

from math import exp

USUAL_SECONDS = 3.0
"""Time constant of the average of a line."""
OPEN_LINE_SECONDS = 0.2
"""An engine gets the next prompt when it needs no longer than this for those before it. What waits longer waits in the
router's queue, where priorities, shares, deadlines and cancellation hold, and where it may still go elsewhere."""

OPENING_MARGIN_SECONDS = 0.001


class PromptLine:
    """The line of an engine, as far as this router placed its prompts. Times are monotonic seconds."""

    __slots__ = ("_usual", "_usual_at", "_was", "ends_at", "head_since", "waiting_seconds")

    def __init__(self) -> None:
        self.ends_at = 0.0
        """When all its prompts are expected to be processed."""
        self.head_since = 0.0
        """When the prompt at its head began."""
        self.waiting_seconds = 0.0
        """Prefill of the requests in the router's queue that wait for this engine."""
        self._usual = self._was = self._usual_at = 0.0

    def seconds(self, now: float) -> float:
        """Return how long a prompt that is placed now waits for those before it."""
        return self.ends_at - now if self.ends_at > now else 0.0

    def usual_seconds(self, now: float) -> float:
        """Return the average of its line and of what waits for it: what the next turn of a conversation will meet."""
        if now > self._usual_at:
            line = self.seconds(now)
            share = 1.0 - exp((self._usual_at - now) / USUAL_SECONDS)
            self._usual += share * (0.5 * (self._was + line) + self.waiting_seconds - self._usual)
            self._was, self._usual_at = line, now
        return self._usual

    def add(self, seconds: float, now: float, *, is_first: bool) -> None:
        """Record a prompt that is placed; `is_first`: no other is being processed."""
        if is_first:
            self.head_since = now
        self._set(self.seconds(now) + seconds, now)

    def advance(self, left_seconds: float, now: float) -> float:
        """Record that the prompt at the head is done, and what is left. Returns how long it took."""
        seconds, self.head_since = now - self.head_since, now
        self._set(left_seconds, now)
        return seconds

    def wait(self, seconds: float, now: float) -> None:
        """Add the prefill of a request that waits for the engine; negative: it no longer does."""
        self.usual_seconds(now)
        # Rounding may leave a little less than nothing.
        self.waiting_seconds = max(0.0, self.waiting_seconds + seconds)

    def _set(self, seconds: float, now: float) -> None:
        self.usual_seconds(now)
        self.ends_at, self._was = now + seconds, seconds
