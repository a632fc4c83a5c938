"""Which names a request may carry as the mesh is, and the one sentence for a name that nothing has."""

from collections.abc import Iterable

from weft.dispatch.agents import AGENT_PREFIX, ROUTE_PREFIX
from weft.dispatch.fleet import FleetSource, FleetView
from weft.kernel.close_names import close_names
from weft.kernel.errors import FieldError
from weft.kernel.reasons import Reason

_SHOWN_CHARS = 64


def known_names(view: FleetView) -> frozenset[str]:
    """Every name a request may carry, asleep or away as its runner may be."""
    models = (name for model in view.models.values() for name in (model.name, model.pool))
    agents = (AGENT_PREFIX + name for name in view.agents)
    return frozenset(models) | frozenset(agents) | frozenset(ROUTE_PREFIX + name for name in view.routes)


def no_such_model(name: str, names: Iterable[str]) -> str:
    """Returns the sentence for a name that nothing has, with those of `names` that are close to it."""
    meant = close_names(name, names) or "GET /v1/models lists what there is"
    return f"no model, pool, agent or route is called {name[:_SHOWN_CHARS]}; {meant}"


class KnownNames:
    """The names of the mesh as it is now, put together once for each change of it."""

    def __init__(self, fleet: FleetSource) -> None:
        self._fleet = fleet
        self._view = FleetView()
        self._names: frozenset[str] = frozenset()

    def require(self, name: str, field: str) -> None:
        """Raises MODEL_NOT_FOUND for a name that nothing has. Before the mesh is known every name passes."""
        view = self._fleet.view
        if view is not self._view:
            self._view, self._names = view, known_names(view)
        if view.revision and name not in self._names:
            words = f"{no_such_model(name, self._names)} (a task may set wait_for_model for one that will come)"
            raise FieldError(field, words, Reason.MODEL_NOT_FOUND)
