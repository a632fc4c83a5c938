"""What a watcher knows: message by message, so that nothing of a message can go untold."""

from dataclasses import dataclass, field
from typing import Any

from weft.api.registry.v1 import registry_service_pb2


@dataclass
class Told:
    """Every message that a watcher was told last of each thing, but for times that are not told each time."""

    messages: dict[tuple[str, str], Any] = field(default_factory=dict)

    @classmethod
    def of(cls, response: registry_service_pb2.WatchResponse) -> "Told":
        told = cls()
        for runner in response.snapshot.runners:
            told.put("runner", runner.runner.name, runner)
        for model in response.snapshot.models:
            told.put("model", model.manifest.name, model)
        for agent_ in response.snapshot.agents:
            told.put("agent", agent_.manifest.name, agent_)
        for route in response.snapshot.routes:
            told.put("route", route.manifest.name, route)
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
            case "model":
                self.put("model", change.model.manifest.name, change.model)
            case "agent":
                self.put("agent", change.agent.manifest.name, change.agent)
            case "route":
                self.put("route", change.route.manifest.name, change.route)
            case "settings":
                self.put("settings", "", change.settings)
            case "deleted_runner":
                del self.messages["runner", change.deleted_runner]
            case "deleted_model":
                del self.messages["model", change.deleted_model]
            case "deleted_agent":
                del self.messages["agent", change.deleted_agent]
            case "deleted_route":
                del self.messages["route", change.deleted_route]
