"""Measures the clock offset between this machine and the registry, and the mesh's time, from the registry's answers."""

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import NOTABLE_OFFSET_SECONDS, Clock, MeshClock, offset_words, refused_words

if TYPE_CHECKING:
    from google.protobuf.timestamp_pb2 import Timestamp

log = get_logger("weft.session")

MIN_CHANGE_SECONDS = 1.0
"""Minimum change of the offset that counts, because answers have latency."""


class ClockOffset:
    """The last measured clock offset in whole seconds; the same answers set the mesh's clock.

    The registry wrote an answer between the request and its arrival. The middle is assumed, so the error is at most
    half the round trip.
    """

    def __init__(self, clock: Clock, mesh_clock: MeshClock) -> None:
        self._clock = clock
        self._mesh_clock = mesh_clock
        self._max_seconds: float | None = None
        self.seconds = 0.0
        """Seconds by which this machine's clock is ahead of the registry's; negative: behind; 0: not measured yet."""

    @property
    def is_notable(self) -> bool:
        """Whether the offset is large enough to report."""
        return abs(self.seconds) >= NOTABLE_OFFSET_SECONDS

    @property
    def is_refused(self) -> bool:
        """Whether the offset exceeds the mesh's limit."""
        return self._max_seconds is not None and abs(self.seconds) > self._max_seconds

    def allow(self, max_seconds: float | None) -> None:
        """Sets the mesh's limit; None: no limit."""
        self._max_seconds = max_seconds

    def note(self, mesh_time: "Timestamp", registry_time: "Timestamp", asked_monotonic: float) -> None:
        """Measures the offset from an answer that just arrived to a request sent at `asked_monotonic`."""
        one_way = timedelta(seconds=max(0.0, self._clock.monotonic() - asked_monotonic) / 2)
        self._mesh_clock.set(_utc(mesh_time) + one_way)
        measured = (self._clock.utc_now() - one_way - _utc(registry_time)).total_seconds()
        if abs(measured - self.seconds) < MIN_CHANGE_SECONDS:
            return
        self.seconds = float(round(measured))
        if self.is_refused:
            log.error("requests are refused", why=refused_words(self.seconds))
        elif self.is_notable:
            log.warning("clock of this machine is wrong", why=offset_words(self.seconds))


def _utc(moment: "Timestamp") -> datetime:
    return moment.ToDatetime(tzinfo=UTC)
