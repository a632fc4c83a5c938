"""What a watcher knows: message by message, so that nothing of a message can go untold."""

from dataclasses import dataclass, field
from typing import Any

from weft.api.registry.v1 import registry_service_pb2
from weft.documents.kinds import record_in


@dataclass
class Told:
    """Every message that a watcher was told last of each thing, but for times that are not told each time."""

    messages: dict[tuple[str, str], Any] = field(default_factory=dict)

    @classmethod
    def of(cls, response: registry_service_pb2.WatchResponse) -> "Told":
        told = cls()
        for runner in response.snapshot.runners:
            told.put("runner", runner.runner.name, runner)
        for resource in response.snapshot.resources:
            told.put(resource.kind, resource.name, record_in(resource))
        told.put("settings", "", response.snapshot.settings)
        return told

    def put(self, kind: str, name: str, message: Any) -> None:
        kept = type(message)()
        kept.CopyFrom(message)
        if kind in {"runner", "model", "agent"}:
            (kept.runner if kind == "runner" else kept).ClearField("last_heartbeat_time")
        self.messages[kind, name] = kept

    def heartbeat(self, change: registry_service_pb2.Change) -> None:
        match change.WhichOneof("kind"):
            case "runner":
                self.put("runner", change.runner.runner.name, change.runner)
            case "resource":
                self.put(change.resource.kind, change.resource.name, record_in(change.resource))
            case "settings":
                self.put("settings", "", change.settings)
            case "deleted_runner":
                del self.messages["runner", change.deleted_runner]
            case "deleted_resource":
                del self.messages[change.deleted_resource.kind, change.deleted_resource.name]
