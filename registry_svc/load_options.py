"""Limits of load options."""

import math

from google.protobuf import duration_pb2

from registry_svc.wire_values import require_at_most, require_text
from weft.api.runner.v1 import load_pb2
from weft.kernel.errors import invalid_field

MAX_PARAMETERS = 64
MAX_PARAMETER_CHARS = 64
MAX_WORD_CHARS = 256
# Ten years: a longer time is a mistake in the unit.
MAX_KEEP_ALIVE_SECONDS = 10 * 365 * 86_400
_MAX_NANOS = 999_999_999


def check_options(options: load_pb2.LoadOptions, field: str) -> None:
    """Raises INVALID_ARGUMENT naming the field for options beyond a limit."""
    require_at_most(list(options.parameters), f"{field}.parameters", MAX_PARAMETERS)
    for name, value in options.parameters.items():
        if not name:
            raise invalid_field(f"{field}.parameters", "must have names")
        require_text(name, f"{field}.parameters", MAX_PARAMETER_CHARS)
        _check_value(value, f"{field}.parameters.{name}")
    if options.HasField("keep_alive"):
        _check_keep_alive(options.keep_alive, f"{field}.keep_alive")


def _check_value(value: load_pb2.LoadValue, field: str) -> None:
    match value.WhichOneof("kind"):
        case None:
            raise invalid_field(field, "must be a whole number, a number, a word, or yes or no")
        case "number":
            if not math.isfinite(value.number):
                raise invalid_field(field, "must be a finite number")
        case "word":
            require_text(value.word, field, MAX_WORD_CHARS)


def _check_keep_alive(duration: duration_pb2.Duration, field: str) -> None:
    mixed = duration.seconds * duration.nanos < 0
    if mixed or abs(duration.seconds) > MAX_KEEP_ALIVE_SECONDS or abs(duration.nanos) > _MAX_NANOS:
        raise invalid_field(field, f"must be a duration of at most {MAX_KEEP_ALIVE_SECONDS} s, or a negative one")
