"""Ownership of names. All resources share one namespace; only a pool may have the name of a model.

A public row keeps its name always, a published one while its runner is live. Names of a dead session are lost: a model
or an agent alone to a new one of its kind, anything else with the whole session.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

_FRIENDS = frozenset({frozenset({ResourceKind.MODEL, ResourceKind.POOL}), frozenset({ResourceKind.POOL})})
# Rows of these kinds can be both declared and published, and a publication then lies under the declaration.
_OVERLAID = frozenset({ResourceKind.MODEL, ResourceKind.AGENT})


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A holder of a name."""

    kind: ResourceKind
    name: str
    session_id: str = ""
    """The session that published it; empty: an operator declared it."""
    runner: str = ""
    """The runner of that session; for a declared model the one it is pinned to, if any."""
    live: bool = True
    """Whether it keeps the name against others: declared ones always do."""

    @property
    def declared(self) -> bool:
        """Whether an operator declared it."""
        return not self.session_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A claim to a name, and the present owners of that name."""

    kind: ResourceKind
    name: str
    owners: tuple[Owner, ...]


def may_share(one: ResourceKind, other: ResourceKind) -> bool:
    """Whether two resources of these kinds may have one name."""
    return frozenset({one, other}) in _FRIENDS


def sessions_to_end(claims: Iterable[Claim], *, own_session: str, runner: str) -> frozenset[str]:
    """Return the dead sessions, by id, that must end so that a session of `runner` gets the names it claims.

    `own_session` is the earlier incarnation that it replaces, empty for none. Raises ALREADY_EXISTS naming the owner's
    kind for a name that is kept. A dead session that only loses a model or an agent is not among the result.
    """
    ended: set[str] = set()
    for claim in claims:
        for owner in claim.owners:
            if may_share(claim.kind, owner.kind) or (owner.session_id and owner.session_id == own_session):
                continue
            overlaid = claim.kind is owner.kind and owner.kind in _OVERLAID
            if overlaid and owner.declared:
                _require_pin(owner, runner)
            elif owner.live:
                raise taken(claim.name, owner)
            elif not overlaid:
                ended.add(owner.session_id)
    return frozenset(ended)


def require_free(claims: Iterable[Claim]) -> None:
    """Raise ALREADY_EXISTS when another kind of resource holds a name that an operator declares.

    Dead owners count too: an operator can delete them, knowing what is lost.
    """
    for claim in claims:
        for owner in claim.owners:
            if owner.kind is not claim.kind and not may_share(claim.kind, owner.kind):
                raise taken(claim.name, owner)


def taken(name: str, owner: Owner) -> WeftError:
    """The refusal of a name that `owner` holds."""
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
