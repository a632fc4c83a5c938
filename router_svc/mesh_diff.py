"""What changed from one view of the mesh to the next, as the scheduler wants to be told."""

from router_svc.fleet_view import candidate_of
from router_svc.policy.endpoints.cluster_view import MeshChange
from router_svc.policy.endpoints.routes import Route
from weft.dispatch.fleet import FleetView, ModelView, RouteView


class MeshDiff:
    """Remembers the last view. Views share what did not change, so that comparing them is comparing identities."""

    def __init__(self) -> None:
        self._last = FleetView()
        self._served_by: dict[str, list[ModelView]] = {}
        """The models of the last view by their runners."""

    @property
    def view(self) -> FleetView:
        """The view that was compared last; revision 0 before the first."""
        return self._last

    def changes_to(self, view: FleetView) -> MeshChange:
        """What is different in `view`, which is the last one from now on."""
        last, self._last = self._last, view
        return MeshChange(
            candidates=tuple(candidate_of(view, model) for model in self._changed(last, view)),
            gone=tuple(last.models.keys() - view.models.keys()),
            routes={name: _route(route) for name, route in view.routes.items()}
            if view.routes is not last.routes
            else None,
            cloud_fallback=view.settings.allow_cloud_fallback if view.settings is not last.settings else None,
        )

    def _changed(self, last: FleetView, view: FleetView) -> list[ModelView]:
        """Models that are not what they were, or whose runner is not.

        Most news is about one runner, and a mesh has thousands of models: these are looked at only when one of them
        changed itself.
        """
        runners = {name for name, runner in view.runners.items() if last.runners.get(name) is not runner}
        runners |= last.runners.keys() - view.runners.keys()
        if view.models is last.models:
            return [model for runner in sorted(runners) for model in self._served_by.get(runner, ())]
        self._served_by = {}
        for model in view.models.values():
            self._served_by.setdefault(model.runner, []).append(model)
        return [
            model
            for name, model in view.models.items()
            if last.models.get(name) is not model or model.runner in runners
        ]


def _route(route: RouteView) -> Route:
    return Route(
        name=route.name,
        candidates=route.candidates,
        budget_seconds=route.budget_seconds,
        keep_alive_seconds=route.keep_alive_seconds,
        pin_primary=route.pin_primary,
    )
