"""What changed from one view of the mesh to the next, as the scheduler wants to be told."""

from router_svc.fleet_view import candidate_of
from router_svc.policy.mesh_change import MeshChange
from router_svc.policy.routes import Route
from weft.dispatch.fleet import FleetView, RouteView


class MeshDiff:
    """Remembers the last view. Views share what did not change, so that comparing them is comparing identities."""

    def __init__(self) -> None:
        self._last = FleetView()

    @property
    def view(self) -> FleetView:
        """The view that was compared last; revision 0 before the first."""
        return self._last

    def changes_to(self, view: FleetView) -> MeshChange:
        """What is different in `view`, which is the last one from now on."""
        last, self._last = self._last, view
        changed = []
        for name, model in view.models.items():
            runner, before = view.runners.get(model.runner), last.models.get(name)
            if before is not model or last.runners.get(before.runner) is not runner:
                changed.append(candidate_of(view, model))
        return MeshChange(
            candidates=tuple(changed),
            gone=tuple(last.models.keys() - view.models.keys()),
            routes={name: _route(route) for name, route in view.routes.items()}
            if view.routes is not last.routes
            else None,
            cloud_fallback=view.settings.allow_cloud_fallback if view.settings is not last.settings else None,
        )


def _route(route: RouteView) -> Route:
    return Route(
        name=route.name,
        candidates=route.candidates,
        budget_seconds=route.budget_seconds,
        keep_alive_seconds=route.keep_alive_seconds,
        pin_primary=route.pin_primary,
    )
