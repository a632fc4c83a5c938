"""When agents whose tools run send results: their model is kept for them for as long as tools usually take."""

from collections import OrderedDict

PRIOR_SECONDS, PRIOR_PAUSES = 5.0, 4.0
"""Assumed duration of tools, and how many pauses it counts as."""
MAX_COUNTED_PAUSES = 64.0
KEPT_RATIO = 2.0
"""A result is awaited for this multiple of the mean; of exponential durations 86 % have ended by then."""
MAX_SHARE_OF_LOAD = 0.5
"""A model is kept for tools that usually take no longer than this share of its load: in `bench.tool_pauses` longer ones
make jobs slower."""
MAX_PAUSE_SECONDS = 600.0
"""A longer pause says nothing about tools, as a person may have answered in it."""
MAX_SESSIONS = 4_096
"""Maximum sessions in a pause per model; the one that has paused longest is dropped first."""


class ToolPauses:
    """Learns from the sessions of each model whose answers ended with calls of their own tools."""

    def __init__(self) -> None:
        self._paused: dict[str, OrderedDict[bytes, float]] = {}
        """When answers ended, by model and session, in this order."""
        self._model_of: dict[bytes, str] = {}
        self._means: dict[str, tuple[float, float]] = {}
        """Mean pause in seconds, and the number of pauses, by model."""

    def begin(self, model: str, session: bytes, now: float) -> None:
        """Record an answer that ended with calls of tools."""
        self.end(session, now)
        paused = self._paused.setdefault(model, OrderedDict())
        paused[session], self._model_of[session] = now, model
        oldest, ended_at = next(iter(paused.items()))
        if len(paused) > MAX_SESSIONS or ended_at < now - MAX_PAUSE_SECONDS:
            del paused[oldest], self._model_of[oldest]

    def end(self, session: bytes, now: float) -> None:
        """Record a request of a session, whatever its model."""
        model = self._model_of.pop(session, None)
        if model is None:
            return
        seconds = now - self._paused[model].pop(session)
        if seconds <= MAX_PAUSE_SECONDS:
            mean, count = self._means.get(model, (PRIOR_SECONDS, PRIOR_PAUSES))
            count = min(count + 1.0, MAX_COUNTED_PAUSES)
            self._means[model] = mean + (seconds - mean) / count, count

    def forget(self, model: str) -> None:
        """Remove a model that left the mesh."""
        for session in self._paused.pop(model, ()):
            del self._model_of[session]
        self._means.pop(model, None)

    def is_awaited(self, model: str, load_seconds: float, now: float) -> bool:
        """Whether agents will send results soon enough to keep a model, given the time that its load takes."""
        paused = self._paused.get(model)
        if not paused:
            return False
        mean, _ = self._means.get(model, (PRIOR_SECONDS, PRIOR_PAUSES))
        return mean <= MAX_SHARE_OF_LOAD * load_seconds and next(reversed(paused.values())) > now - KEPT_RATIO * mean
