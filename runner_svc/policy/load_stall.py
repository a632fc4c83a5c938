"""Whether a loading backend still gets anywhere."""

from dataclasses import dataclass

from runner_svc.policy.work import MIN_WORK_SHARE

WINDOW_SECONDS = 30.0
"""Work is looked for in about the last so many seconds, or what begins after a long wait would be seen too late."""


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
    _mark: LoadSigns | None = None
    """A look between one and two windows ago; None: it moved more recently than that."""
    _next_mark: LoadSigns | None = None

    def observe(self, signs: LoadSigns) -> "LoadWatch":
        """The watch after another look: moved on if there was output, or work worth the name."""
        if signs.output_bytes > self.moved.output_bytes or _worked(self._mark or self.moved, signs):
            return LoadWatch(signs)
        newest = self._next_mark or self.moved
        if signs.at_seconds - newest.at_seconds < WINDOW_SECONDS:
            return self
        return LoadWatch(self.moved, self._next_mark, signs)

    def stalled(self, now_seconds: float, limit_seconds: float) -> bool:
        """Whether nothing moved for `limit_seconds`."""
        return now_seconds - self.moved.at_seconds >= limit_seconds


def _worked(before: LoadSigns, after: LoadSigns) -> bool:
    elapsed = after.at_seconds - before.at_seconds
    return after.cpu_seconds - before.cpu_seconds >= MIN_WORK_SHARE * elapsed
