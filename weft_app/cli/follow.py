"""Watches of the mesh that survive lost connections."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors import WeftError
from weft.kernel.reasons import REGISTRY_AWAY, Reason
from weft_app.cli.options import note

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weft.api.registry.v1.event_pb2 import Event
    from weft.documents.kinds import Key
    from weft.documents.mesh_state import MeshState

RETRY_PAUSE_SECONDS = 1.0
RETRY_LIMIT_SECONDS = 60.0
"""Longest outage that is retried."""
AWAY = REGISTRY_AWAY | {Reason.SHUTTING_DOWN}
"""Reasons after which a registry may be back soon."""


class Breaks:
    """Retry policy of a broken watch: whether it is opened again, and after which pause."""

    def __init__(self) -> None:
        self._began = False
        self._away_since: float | None = None

    def none(self) -> None:
        """Resets the outage: something arrived."""
        self._began, self._away_since = True, None

    def survive(self, error: WeftError) -> None:
        """Waits until the next try is due. Raises `error` where a retry cannot help or the outage is too long."""
        if error.reason is Reason.WATCH_LAGGED:
            note("this terminal is slower than the mesh; some changes are merged")
            return
        if error.reason not in AWAY or not self._began:
            raise error
        if self._away_since is None:
            self._away_since = time.monotonic()
            note(f"{error.message}; watching again when it is back")
        if time.monotonic() - self._away_since > RETRY_LIMIT_SECONDS:
            raise error
        time.sleep(RETRY_PAUSE_SECONDS)


def follow_resources(home: Path) -> "Iterator[tuple[MeshState, frozenset[Key]]]":
    """Yields views of the mesh with the keys that may have changed: everything at first, then every change.

    Raises SERVICE_UNAVAILABLE when the mesh does not run, or was unreachable for RETRY_LIMIT_SECONDS.
    """
    from weft.client.resources import connect_registry  # noqa: PLC0415 - what only polls needs no gRPC
    from weft.documents.mesh_state import MeshState  # noqa: PLC0415 - as above

    state, breaks = MeshState(), Breaks()
    while True:
        try:
            with connect_registry(home=home) as registry:
                for response in registry.watch():
                    breaks.none()
                    yield state, state.fold(response)
        except WeftError as error:
            breaks.survive(error)


def follow_events(home: Path, kind: ResourceKind | None, name: str, past_limit: int) -> "Iterator[Event]":
    """Yields recent events, then every new one, each once. Raises like `follow_resources`."""
    from weft.client.resources import connect_registry  # noqa: PLC0415 - as above

    last, breaks = 0, Breaks()
    while True:
        try:
            with connect_registry(home=home) as registry:
                # The watch is opened before the past is listed, so that no event falls between the two.
                coming = registry.watch_events(kind, name)
                past = registry.events(kind, name, past_limit)
                breaks.none()
                if past and past[-1].sequence < last:
                    # A restarted registry: its event numbers start again.
                    last = 0
                for event in _both(past, coming):
                    if event.sequence > last:
                        last = event.sequence
                        yield event
        except WeftError as error:
            breaks.survive(error)


def _both(past: "list[Event]", coming: "Iterator[Event]") -> "Iterator[Event]":
    yield from past
    yield from coming
