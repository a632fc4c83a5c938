"""Wake plans to and from messages. Validates nothing: the registry does, where a plan enters the mesh."""

from weft.api.registry.v1 import wake_pb2
from weft.wake.recipes import (
    DEFAULT_BROADCAST_ADDRESS,
    DEFAULT_MAX_WAIT_SECONDS,
    DEFAULT_WAKE_PORT,
    CommandRecipe,
    HttpRecipe,
    Recipe,
    WakeOnLanRecipe,
    WakePlan,
)


def plan_of(message: wake_pb2.Wake) -> WakePlan:
    """Reads a plan from a message."""
    return WakePlan(
        by_runner=message.by_runner,
        by_mesh=_recipe_of(message.by_mesh),
        max_wait_seconds=message.max_wait.ToNanoseconds() / 1e9 or DEFAULT_MAX_WAIT_SECONDS,
    )


def plan_message(plan: WakePlan) -> wake_pb2.Wake:
    """A plan as a message."""
    message = wake_pb2.Wake(by_runner=plan.by_runner)
    message.max_wait.FromNanoseconds(int(plan.max_wait_seconds * 1e9))
    match plan.by_mesh:
        case HttpRecipe(url=url, method=method, headers=headers):
            message.by_mesh.http.url = url
            message.by_mesh.http.method = method
            message.by_mesh.http.headers.update(headers)
        case CommandRecipe(argv=argv):
            message.by_mesh.command.argv.extend(argv)
        case WakeOnLanRecipe(mac_address=mac_address, broadcast_address=broadcast_address, port=port):
            message.by_mesh.wake_on_lan.mac_address = mac_address
            message.by_mesh.wake_on_lan.broadcast_address = broadcast_address
            message.by_mesh.wake_on_lan.port = port
        case None:
            pass
    return message


def _recipe_of(message: wake_pb2.WakeRecipe) -> Recipe | None:
    match message.WhichOneof("action"):
        case "http":
            http = message.http
            return HttpRecipe(url=http.url, method=http.method or "POST", headers=dict(http.headers))
        case "command":
            return CommandRecipe(argv=tuple(message.command.argv))
        case "wake_on_lan":
            packet = message.wake_on_lan
            return WakeOnLanRecipe(
                mac_address=packet.mac_address,
                broadcast_address=packet.broadcast_address or DEFAULT_BROADCAST_ADDRESS,
                port=packet.port or DEFAULT_WAKE_PORT,
            )
        case _:
            return None
