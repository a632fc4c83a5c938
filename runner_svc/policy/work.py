"""Whether processes work, told from the processor and GPU time they have used."""

from collections import deque
from dataclasses import dataclass, field

MIN_WORK_SHARE = 0.05
"""Answering probes and writing comments costs an engine a little; less than this share of one core, or of one GPU, is
not work on a prompt or a model's file."""
MAX_SAMPLES = 32
"""Samples that are kept of a window: enough to let it slide smoothly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSigns:
    """What an engine's processes have used so far."""

    cpu_seconds: float
    gpu_seconds: float | None = None
    """None: unknown."""


@dataclass(slots=True)
class WorkWatch:
    """Compares what was used with what was used earlier, at most `window_seconds` earlier.

    The window is why one short burst, such as a collection of garbage, is no sign of work, and why work that begins
    late is seen within a twentieth of it.
    """

    window_seconds: float
    _samples: deque[tuple[float, EngineSigns]] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES + 2))

    def forget(self) -> None:
        """Begin anew with the next look."""
        self._samples.clear()

    def worked(self, now: float, signs: EngineSigns) -> bool:
        """Whether they worked since the last yes, or since the first look."""
        if self._samples and _is_no_continuation(self._samples[0][1], signs):
            self._samples.clear()
        while len(self._samples) > 1 and self._samples[1][0] <= now - self.window_seconds:
            self._samples.popleft()
        worked = bool(self._samples) and _share(self._samples[0], now, signs) >= MIN_WORK_SHARE
        if worked:
            self._samples.clear()
        if not self._samples or now - self._samples[-1][0] >= self.window_seconds / MAX_SAMPLES:
            self._samples.append((now, signs))
        return worked


def _is_no_continuation(before: EngineSigns, after: EngineSigns) -> bool:
    """Figures that fall, or that begin only now, measure nothing."""
    gpu_begins = before.gpu_seconds is None and after.gpu_seconds is not None
    return gpu_begins or after.cpu_seconds < before.cpu_seconds


def _share(before: tuple[float, EngineSigns], now: float, after: EngineSigns) -> float:
    since, first = before
    gpu_seconds = 0.0
    if first.gpu_seconds is not None and after.gpu_seconds is not None:
        gpu_seconds = after.gpu_seconds - first.gpu_seconds
    return max(after.cpu_seconds - first.cpu_seconds, gpu_seconds) / (now - since) if now > since else 0.0
