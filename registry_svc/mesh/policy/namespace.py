"""Ownership of names. All resources share one namespace; only a pool may have the name of a model.

A declared resource always keeps its name, a published one while its runner is active, and a model from the list of a
server until its name is declared for something else. A dead session loses the name of
a model or agent to a new one of that kind, and ends if it loses any other name.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

_FRIENDS = frozenset({frozenset({ResourceKind.MODEL, ResourceKind.POOL}), frozenset({ResourceKind.POOL})})
# Resources of these kinds can be both declared and published; the declaration takes precedence.
_OVERLAID = frozenset({ResourceKind.MODEL, ResourceKind.AGENT})


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A holder of a name."""

    kind: ResourceKind
    name: str
    session_id: str = ""
    """Publishing session; empty: declared by an operator."""
    runner: str = ""
    """Runner of the session; for a declared model, the runner that it is pinned to, if any."""
    live: bool = True
    """Whether it keeps the name; always true for declared resources."""
    listed: bool = False
    """Whether its name comes from the list of a server."""

    @property
    def declared(self) -> bool:
        """Whether an operator declared it."""
        return not self.session_id


@dataclass(frozen=True, slots=True, kw_only=True)
class NameOwners:
    """A wanted name, with its current owners."""

    kind: ResourceKind
    name: str
    owners: tuple[Owner, ...]


def may_share(one: ResourceKind, other: ResourceKind) -> bool:
    """Whether two resources of these kinds may have the same name."""
    return frozenset({one, other}) in _FRIENDS


def sessions_to_end(wanted: Iterable[NameOwners], *, own_session: str, runner: str) -> frozenset[str]:
    """Returns the ids of dead sessions that must end so that a session of `runner` gets its names.

    `own_session` is the earlier incarnation that it replaces, or "". Raises ALREADY_EXISTS with the owner's kind for a
    name that is kept. The result excludes dead sessions that only lose models or agents.
    """
    ended: set[str] = set()
    for each in wanted:
        for owner in each.owners:
            if may_share(each.kind, owner.kind) or (owner.session_id and owner.session_id == own_session):
                continue
            overlaid = each.kind is owner.kind and owner.kind in _OVERLAID
            if overlaid and owner.declared:
                _require_pin(owner, runner)
            elif owner.live:
                raise taken(each.name, owner)
            elif not overlaid:
                ended.add(owner.session_id)
    return frozenset(ended)


def require_free(wanted: Iterable[NameOwners]) -> None:
    """Raises ALREADY_EXISTS if a resource of another kind has a name that an operator declares.

    Dead owners count, too: the operator can delete them deliberately. Models from lists of servers lose their names.
    """
    for each in wanted:
        for owner in each.owners:
            if owner.kind is not each.kind and not may_share(each.kind, owner.kind) and not owner.listed:
                raise taken(each.name, owner)


def taken(name: str, owner: Owner) -> WeftError:
    """Returns the error for a name that `owner` has."""
    whose = "is declared by an operator" if owner.declared else f"belongs to the runner {owner.runner!r}"
    if owner.kind is ResourceKind.RUNNER:
        whose = "belongs to another live session" if owner.live else "belongs to an inactive runner"
    return WeftError(
        Reason.ALREADY_EXISTS,
        f"the name {name!r} is taken: the {owner.kind.value} called so {whose}; choose another name or delete it first",
        metadata={"owner_kind": owner.kind.value, owner.kind.value: owner.name},
    )


def _require_pin(owner: Owner, runner: str) -> None:
    if owner.runner and owner.runner != runner:
        raise WeftError(
            Reason.ALREADY_EXISTS,
            f"the model {owner.name!r} is declared for the runner {owner.runner!r} alone; "
            "publish another name or change the declaration",
            metadata={"owner_kind": ResourceKind.MODEL.value, ResourceKind.MODEL.value: owner.name},
        )
