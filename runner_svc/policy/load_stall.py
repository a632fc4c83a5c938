"""Whether a loading backend still gets anywhere."""

from dataclasses import dataclass

MIN_CPU_SHARE = 0.05
"""Answering our own health probes costs a server a little CPU; less than this share of one core is not loading."""


@dataclass(frozen=True, slots=True)
class LoadSigns:
    """What can be seen of a loading process at one moment."""

    at_seconds: float
    output_bytes: int
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class LoadWatch:
    """The last moment at which loading was seen to move."""

    moved: LoadSigns

    def observe(self, signs: LoadSigns) -> "LoadWatch":
        """The watch after another look: moved on if there was output, or work worth the name."""
        elapsed = signs.at_seconds - self.moved.at_seconds
        worked = signs.cpu_seconds - self.moved.cpu_seconds >= MIN_CPU_SHARE * elapsed
        return LoadWatch(signs) if signs.output_bytes > self.moved.output_bytes or worked else self

    def stalled(self, now_seconds: float, limit_seconds: float) -> bool:
        """Whether nothing moved for `limit_seconds`."""
        return now_seconds - self.moved.at_seconds >= limit_seconds
