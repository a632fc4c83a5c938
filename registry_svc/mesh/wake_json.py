"""Wake plans to and from the JSON that is kept of them.

    {"by_runner": true, "max_wait_seconds": 60.0, "by_mesh": {"http": {"url": ..., "method": ..., "headers": {...}}}}

`by_mesh` is absent, or has one of `http`, `command` {"argv": [...]} and `wake_on_lan` {"mac_address": ...,
"broadcast_address": ..., "port": ...}. There is no version: keys that are not known are passed over, and keys that are
missing have their defaults, so that a registry reads what an older or a newer one wrote.
"""

import json
from typing import Any

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


def plan_to_json(plan: WakePlan) -> str:
    """A plan as JSON in ASCII with sorted keys, so that equal plans are equal texts."""
    document: dict[str, Any] = {"by_runner": plan.by_runner, "max_wait_seconds": plan.max_wait_seconds}
    if plan.by_mesh is not None:
        document["by_mesh"] = _action(plan.by_mesh)
    return json.dumps(document, sort_keys=True)


def plan_from_json(text: str) -> WakePlan | None:
    """The plan in `text`; None when it names nobody who could wake the model, such as only an action not known here.

    Raises ValueError when `text` is not such a document; the message holds nothing of it.
    """
    # Not chained: json's error carries the whole text, and in it may be credentials.
    try:
        document = json.loads(text)
        plan = WakePlan(
            by_runner=bool(document.get("by_runner", False)),
            by_mesh=_recipe(document.get("by_mesh") or {}),
            max_wait_seconds=float(document.get("max_wait_seconds", DEFAULT_MAX_WAIT_SECONDS)),
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError("not a wake plan") from None
    return plan if plan.by_runner or plan.by_mesh is not None else None


def _action(recipe: Recipe) -> dict[str, Any]:
    match recipe:
        case HttpRecipe(url=url, method=method, headers=headers):
            return {"http": {"url": url, "method": method, "headers": dict(headers)}}
        case CommandRecipe(argv=argv):
            return {"command": {"argv": list(argv)}}
        case WakeOnLanRecipe(mac_address=mac_address, broadcast_address=broadcast_address, port=port):
            packet = {"mac_address": mac_address, "broadcast_address": broadcast_address, "port": port}
            return {"wake_on_lan": packet}


def _recipe(action: dict[str, Any]) -> Recipe | None:
    if "http" in action:
        http = action["http"]
        headers = {str(name): str(value) for name, value in http.get("headers", {}).items()}
        return HttpRecipe(url=str(http["url"]), method=str(http.get("method", "POST")), headers=headers)
    if "command" in action:
        return CommandRecipe(argv=tuple(str(part) for part in action["command"]["argv"]))
    if "wake_on_lan" in action:
        packet = action["wake_on_lan"]
        return WakeOnLanRecipe(
            mac_address=str(packet["mac_address"]),
            broadcast_address=str(packet.get("broadcast_address", DEFAULT_BROADCAST_ADDRESS)),
            port=int(packet.get("port", DEFAULT_WAKE_PORT)),
        )
    return None
