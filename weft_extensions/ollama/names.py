"""Model names as Ollama's clients write them: with or without the tag `:latest`."""

from weft.dispatch.agents import agent_name_of
from weft.dispatch.fleet import FleetView
from weft.kernel.values.names import LATEST, ROUTE_PREFIX

SURFACE = "ollama"


def mesh_name(view: FleetView, given: str) -> str:
    """Returns the name in the mesh: `given` if it is known, otherwise with or without LATEST."""
    if _is_known(view, given):
        return given
    if given.endswith(LATEST):
        return given.removesuffix(LATEST)
    return given + LATEST if _is_known(view, given + LATEST) else given


def _is_known(view: FleetView, name: str) -> bool:
    agent = agent_name_of(name)
    if agent is not None:
        return agent in view.agents
    if name.startswith(ROUTE_PREFIX):
        return name.removeprefix(ROUTE_PREFIX) in view.routes
    return bool(view.pool_members(name))
