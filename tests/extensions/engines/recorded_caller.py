"""A caller of an engine's server that notes what it is sent."""

from typing import Any
from unittest.mock import Mock

from typing_extensions import override

from weft_extensions.engines.engine_host.http_server import Caller


class RecordedCaller(Caller):
    """Has no connection. `happened` may hold notes of others between the events."""

    def __init__(self) -> None:
        super().__init__(Mock())
        self.happened: list[Any] = []
        self.has_left = False

    def leave(self) -> None:
        self.has_left = True

    @override
    def is_gone(self) -> bool:
        return self.has_left

    @override
    def send(self, event: dict[str, Any]) -> None:
        self.happened.append(event)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.happened if isinstance(event, dict) and event["type"] == kind]
