"""Short forms of wake plans and recipes for tests."""

from collections.abc import Mapping, Sequence

from weft.api.registry.v1.wake_pb2 import CommandAction, HttpAction, Wake, WakeOnLanAction, WakeRecipe
from weft.wake.recipes import DEFAULT_MAX_WAIT_SECONDS


def http_recipe(url: str, method: str = "POST", headers: Mapping[str, str] | None = None) -> WakeRecipe:
    return WakeRecipe(http=HttpAction(url=url, method=method, headers=headers))


def command_recipe(argv: Sequence[str]) -> WakeRecipe:
    return WakeRecipe(command=CommandAction(argv=argv))


def packet_recipe(mac_address: str, broadcast_address: str = "255.255.255.255", port: int = 9) -> WakeRecipe:
    action = WakeOnLanAction(mac_address=mac_address, broadcast_address=broadcast_address, port=port)
    return WakeRecipe(wake_on_lan=action)


def wake_plan(
    *,
    by_runner: bool = False,
    by_mesh: WakeRecipe | None = None,
    max_wait_seconds: float = DEFAULT_MAX_WAIT_SECONDS,
) -> Wake:
    plan = Wake(by_runner=by_runner, by_mesh=by_mesh)
    plan.max_wait.FromNanoseconds(round(max_wait_seconds * 1e9))
    return plan
