"""Following the mesh for as long as somebody looks, over breaks of the connection."""

import time
from collections.abc import Iterator
from pathlib import Path

from weft.client.resources import connect_registry
from weft.documents.document_base import ResourceKind
from weft.documents.documents import EventDocument
from weft.documents.mesh_state import Key, MeshState
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft_app.cli.options import note

RETRY_PAUSE_SECONDS = 1.0
RETRY_LIMIT_SECONDS = 60.0
"""A mesh that is away for longer is not coming back by itself."""
MAX_PAST_EVENTS = 1000
AWAY = frozenset({Reason.SERVICE_UNAVAILABLE, Reason.SHUTTING_DOWN})
"""Reasons of a registry that may be back soon."""


class Breaks:
    """Whether a watch that broke off is begun again, and how long to wait before."""

    def __init__(self) -> None:
        self._began = False
        self._away_since: float | None = None

    def none(self) -> None:
        """Something arrived."""
        self._began, self._away_since = True, None

    def survive(self, error: WeftError) -> None:
        """Wait until it is time to try again. Raises `error` where that does not help."""
        if error.reason is Reason.WATCH_LAGGED:
            note("this terminal is slower than the mesh; some changes are shown together")
            return
        if error.reason not in AWAY or not self._began:
            raise error
        if self._away_since is None:
            self._away_since = time.monotonic()
            note(f"{error.message}; watching again when it is back")
        if time.monotonic() - self._away_since > RETRY_LIMIT_SECONDS:
            raise error
        time.sleep(RETRY_PAUSE_SECONDS)


def follow_resources(home: Path) -> Iterator[tuple[MeshState, frozenset[Key]]]:
    """The state of the mesh and what may have changed in it: everything at first, then with every change.

    Raises SERVICE_UNAVAILABLE when the mesh does not run, or was away for RETRY_LIMIT_SECONDS.
    """
    state, breaks = MeshState(), Breaks()
    while True:
        try:
            with connect_registry(home=home) as registry:
                for response in registry.watch():
                    breaks.none()
                    yield state, state.fold(response)
        except WeftError as error:
            breaks.survive(error)


def follow_events(
    home: Path, kind: ResourceKind | None, name: str, past_limit: int = MAX_PAST_EVENTS
) -> Iterator[EventDocument]:
    """The last events, then every new one; none twice. Raises like `follow_resources`."""
    last, breaks = 0, Breaks()
    while True:
        try:
            with connect_registry(home=home) as registry:
                # Begun before the past is asked for, so that nothing falls between the two.
                coming = registry.watch_events(kind, name)
                past = registry.events(kind, name, past_limit)
                breaks.none()
                if past and past[-1].sequence < last:
                    # Another life of the registry, which counts anew.
                    last = 0
                for event in _both(past, coming):
                    if event.sequence > last:
                        last = event.sequence
                        yield event
        except WeftError as error:
            breaks.survive(error)


def _both(past: list[EventDocument], coming: Iterator[EventDocument]) -> Iterator[EventDocument]:
    yield from past
    yield from coming
