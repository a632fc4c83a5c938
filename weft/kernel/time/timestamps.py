"""Conversions between protobuf timestamps and UTC datetimes, and between its durations and seconds."""

from datetime import UTC, datetime
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

NANOSECONDS = 1_000_000_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def stamp_of(moment: datetime | float) -> Timestamp:
    """Returns the timestamp of a datetime, or of UTC seconds since the epoch."""
    known = moment if isinstance(moment, datetime) else datetime.fromtimestamp(moment, UTC)
    # `FromDatetime` takes four times as long, and heartbeats and watches contain many timestamps.
    since = (known if known.tzinfo is not None else known.replace(tzinfo=UTC)) - _EPOCH
    return Timestamp(seconds=since.days * 86_400 + since.seconds, nanos=since.microseconds * 1_000)


def optional_stamp(moment: datetime | float | None) -> Timestamp | None:
    """Returns the timestamp of a moment; None for None, which leaves a message field unset."""
    return None if moment is None else stamp_of(moment)


def datetime_of(stamp: Timestamp) -> datetime:
    """Returns a timestamp as a UTC datetime."""
    return stamp.ToDatetime(UTC)


def optional_datetime(message: Any, field: str) -> datetime | None:
    """Returns a timestamp field of a message as a UTC datetime; None if it is not set."""
    return datetime_of(getattr(message, field)) if message.HasField(field) else None


def duration_of(seconds: float) -> Duration:
    """Returns seconds as a duration."""
    nanos = round(seconds * NANOSECONDS)
    if nanos >= 0:
        return Duration(seconds=nanos // NANOSECONDS, nanos=nanos % NANOSECONDS)
    duration = Duration()
    duration.FromNanoseconds(nanos)
    return duration


def optional_duration(seconds: float | None) -> Duration | None:
    """Returns seconds as a duration; None for None, which leaves a message field unset."""
    return None if seconds is None else duration_of(seconds)


def optional_seconds(message: Any, field: str) -> float | None:
    """Returns a duration field of a message in seconds; None if it is not set."""
    return seconds_of(getattr(message, field)) if message.HasField(field) else None


def set_seconds(duration: Duration, seconds: float) -> None:
    """Sets a duration of at least 0. Protobuf's functions also support negative ones and take five times as long."""
    nanos = int(seconds * NANOSECONDS) if seconds > 0.0 else 0
    # A dozen are set per request; operators are no calls.
    duration.seconds, duration.nanos = nanos // NANOSECONDS, nanos % NANOSECONDS


def seconds_of(duration: Duration | Timestamp) -> float:
    """Returns a duration, or the time since the epoch, in seconds."""
    return (duration.seconds * NANOSECONDS + duration.nanos) / NANOSECONDS
