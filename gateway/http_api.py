"""One HTTP API of a gateway: its routers, and the collaborators of their handlers. What `ApiHook.place` names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.deps import GatewayDeps
from gateway.ports import GatewayPorts
from gateway.routing import ApiRouter, EdgeApp


def _given_nothing(_deps: GatewayDeps, _ports: GatewayPorts) -> Mapping[Any, object]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpApi:
    """The endpoints of one API."""

    router: ApiRouter
    collaborators: Callable[[GatewayDeps, GatewayPorts], Mapping[Any, object] | None] = _given_nothing
    """Returns the collaborators of its handlers by class or name, besides those that every gateway has.

    None: this gateway lacks one of them, and does not serve the API.
    """

    def serve(self, app: EdgeApp, deps: GatewayDeps, ports: GatewayPorts) -> None:
        """Adds the API to the application of a gateway, if it has what the API needs."""
        given = self.collaborators(deps, ports)
        if given is not None:
            app.serve(self.router, given)
