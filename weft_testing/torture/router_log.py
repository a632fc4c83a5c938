"""What routers log of tasks, as events of a history."""

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from weft_testing.torture.events import Event, Kind, whole_lines
from weft_testing.torture.history import CANCELLED, COMPLETED, FAILED

_KINDS = {
    "task claimed": Kind.CLAIMED,
    "task ended": Kind.ENDED,
    "task reverted": Kind.REVERTED,
    "task lease lost": Kind.LEASE_LOST,
    "task cancelled": Kind.CANCELLED,
}
_STATES = {"completed": COMPLETED, "failed": FAILED, "cancelled": CANCELLED}
_BACKEND_KINDS = {"begun": Kind.BEGUN, "finished": Kind.LEFT, "cancelled": Kind.LEFT, "failed": Kind.LEFT}


def read_router_log(path: Path) -> Iterator[Event]:
    """The lines about tasks, in order. Raises ValueError for a line that is no JSON."""
    for line in map(json.loads, whole_lines(path)):
        kind = _KINDS.get(line["event"])
        if kind is not None:
            yield _event(kind, line)


def read_backend_log(path: Path) -> Iterator[Event]:
    """What the fake backends wrote (see weft_testing.fake_backend.request_log)."""
    for line in map(json.loads, whole_lines(path)):
        yield Event(
            kind=_BACKEND_KINDS[line["event"]],
            at=line["at"],
            source=f"backend {line['pid']}",
            task=line["request_id"],
            note=line["event"],
        )


def _event(kind: Kind, line: Mapping[str, Any]) -> Event:
    return Event(
        kind=kind,
        at=datetime.fromisoformat(line["timestamp"]).timestamp(),
        source="router",
        task=line["task"],
        attempt=line.get("attempt", 0),
        owner=line.get("owner") or "",
        state=_STATES.get(str(line.get("state", "")).lower(), 0),
        note=str(line.get("reason", "")),
    )
