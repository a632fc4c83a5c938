"""How a request is handled by its runner: values to messages and back, with their bounds."""

import math

from google.protobuf.duration_pb2 import Duration

from weft.api.router.v1 import inference_service_pb2
from weft.api.runner.v1 import serve_options_pb2
from weft.kernel.errors import invalid_field
from weft.kernel.names import MAX_CACHE_TAG_CHARS, MAX_CLIENT_CHARS, MAX_SESSION_CHARS, require_token
from weft.kernel.request import CALLER_BANDS, CacheMode, Handling, Priority
from weft.kernel.units import keep_alive_seconds

_NANOSECONDS = 1e9
_CACHE_MODES = {0: CacheMode.AUTO, **{mode.value: mode for mode in CacheMode}}
Options = inference_service_pb2.RequestOptions | serve_options_pb2.ServeOptions


def serve_options(handling: Handling, priority: Priority, *, whole: bool = False) -> serve_options_pb2.ServeOptions:
    """The options sent to a runner. `whole`: the answer is not read before it is complete."""
    options = serve_options_pb2.ServeOptions(
        cache_mode=handling.cache_mode.value,  # type: ignore[arg-type]  # same numbers
        cache_tag=handling.cache_tag,
        priority=priority.wire,  # type: ignore[arg-type]  # same numbers
        whole=whole,
    )
    if handling.keep_alive_seconds is not None:
        options.keep_alive.FromNanoseconds(math.ceil(handling.keep_alive_seconds * _NANOSECONDS))
    return options


def handling_of(options: Options) -> Handling:
    """What a message says. Raises INVALID_ARGUMENT naming the field that is out of range."""
    mode = _CACHE_MODES.get(options.cache_mode)
    if mode is None:
        raise invalid_field("options.cache_mode", "must be auto, prefix or none")
    keep_alive = _seconds(options.keep_alive) if options.HasField("keep_alive") else None
    return Handling(
        cache_mode=mode,
        cache_tag=cache_tag(options.cache_tag, "options.cache_tag") if options.cache_tag else "",
        keep_alive_seconds=None if keep_alive is None else keep_alive_seconds(keep_alive, "options.keep_alive"),
    )


def priority_of(options: inference_service_pb2.RequestOptions) -> Priority:
    """The band that a caller names; not set: normal. Raises INVALID_ARGUMENT for one that no caller can claim."""
    band = Priority.from_wire(options.priority)
    if band is None or band not in CALLER_BANDS:
        raise invalid_field("options.priority", "must be high, normal or low")
    return band


def client_of(options: inference_service_pb2.RequestOptions) -> str:
    """The client id that the caller states; empty: none. Raises INVALID_ARGUMENT for an invalid one."""
    return require_token(options.client_id, "options.client_id", MAX_CLIENT_CHARS) if options.client_id else ""


def session_of(options: inference_service_pb2.RequestOptions) -> str:
    """The session that a caller names; empty: none. Raises INVALID_ARGUMENT for one that is too long."""
    return require_session(options.session, "options.session")


def require_session(text: str, field: str) -> str:
    """Return `text` if it may name a session; otherwise raise INVALID_ARGUMENT naming `field`."""
    if len(text) > MAX_SESSION_CHARS:
        raise invalid_field(field, f"must have at most {MAX_SESSION_CHARS} characters")
    return text


def granted_priority_of(options: serve_options_pb2.ServeOptions) -> Priority:
    """The band that a service of the mesh names to a runner; not set: normal."""
    band = Priority.from_wire(options.priority)
    if band is None:
        raise invalid_field("options.priority", "must be high, normal, low, system or durable")
    return band


def cache_tag(text: str, field: str) -> str:
    """Return `text` if it may be a cache tag; otherwise raise INVALID_ARGUMENT naming `field`."""
    return require_token(text, field, MAX_CACHE_TAG_CHARS)


def _seconds(duration: Duration) -> float:
    # Beyond what a Duration may hold, its own arithmetic fails; here such a length is only too long.
    return duration.seconds + duration.nanos / _NANOSECONDS
