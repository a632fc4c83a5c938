"""The names that a caller may see, in errors about unknown ones and about resources in use."""

from collections.abc import Iterable

from weft.dispatch.agents import name_asked_for, usable_names
from weft.dispatch.fleet import FleetView
from weft.documents.rights import hide_names
from weft.kernel.access.principal import VIEW_MODELS, VIEW_RUNNERS, Principal
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.unknown_names import (
    AGENT,
    MODEL,
    MODEL_OR_POOL,
    POOL,
    ROUTE,
    RUNNER,
    TARGET,
    UNKNOWN_KIND,
    UNKNOWN_NAME,
    WORKFLOW,
    among,
)

_REQUESTABLE = frozenset({"", MODEL, POOL, MODEL_OR_POOL, AGENT, ROUTE, WORKFLOW, TARGET})
"""Kinds whose names requests can ask for."""


def with_visible_names(error: WeftError, view: FleetView, principal: Principal) -> WeftError:
    """Returns an error with only those names of resources that the caller may see.

    Services behind the gateway do not know its caller, and may have listed other names.
    """
    hide_names(error, principal)
    return among(error, _visible(error, view, principal)) if UNKNOWN_NAME in error.metadata else error


def _visible(error: WeftError, view: FleetView, principal: Principal) -> Iterable[str]:
    kind = error.metadata.get(UNKNOWN_KIND, "")
    if kind == RUNNER:
        return view.runners if principal.may(VIEW_RUNNERS) else ()
    if kind not in _REQUESTABLE:
        return ()
    targets = view.targets
    seen = {each for each in targets if principal.may_name(VIEW_MODELS, name_asked_for(each))}
    seen.update(usable_names(targets, principal))
    if kind == TARGET:
        return seen
    if kind in (AGENT, ROUTE, WORKFLOW):
        # A request's model has the prefix, the name of a resource does not.
        prefix, keep = f"{kind}/", error.reason is Reason.MODEL_NOT_FOUND
        return (each if keep else each.removeprefix(prefix) for each in seen if each.startswith(prefix))
    return (each for each in seen if "/" not in each)
