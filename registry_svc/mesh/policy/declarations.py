"""Decides the outcome of declarations, and whether their targets exist."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from registry_svc.mesh.states import Outcome
from weft.documents.kind import PointsTo, Reference
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.unknown_names import unknown_name, unknown_target


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Current state of a reference's target."""

    name: str
    model_known: bool
    """Whether a model with this name exists."""
    pool_members: Collection[str]
    """Members of the pool with this name."""


def exists(target: Target, to: PointsTo, *, arriving: Mapping[str, str], leaving: Collection[str]) -> bool:
    """Whether the target exists after adding the models `arriving` (pool by name) and removing those `leaving`."""
    is_model = target.name in arriving or (target.model_known and target.name not in leaving)
    is_pool = target.name in arriving.values() or any(
        member not in leaving and member not in arriving for member in target.pool_members
    )
    return (is_model and to is not PointsTo.POOL) or (is_pool and to is not PointsTo.MODEL)


def absent(kind: ResourceKind, name: str, reference: Reference, names: Iterable[str]) -> WeftError:
    """Returns MODEL_NOT_FOUND for a reference without a target.

    `names` are possible targets that the author may see, with prefixes if requests need them.
    """
    to, target = reference.field.to, reference.target
    unknown = unknown_target(target, names) if to is PointsTo.REQUESTABLE else unknown_name(to.value, target, names)
    return WeftError(
        Reason.MODEL_NOT_FOUND,
        f"the {reference.field.words} of the {kind.value} {name!r} is neither in the mesh nor in this call: "
        f"{unknown.message}",
        metadata={kind.value: name, reference.field.key: target},
    )


def require_free_scope(kind: ResourceKind, name: str, scope: str, other: str) -> None:
    """Raises ALREADY_EXISTS if another document, `other`, has the same scope; "": none has."""
    if other:
        raise WeftError(
            Reason.ALREADY_EXISTS,
            f"the {kind.value} {other!r} stands for {scope} already; delete it, or change it instead of declaring "
            f"{name!r}",
            metadata={"owner_kind": kind.value, kind.value: other},
        )


MAX_LISTED_NAMES = 10


def decide_outcome(
    kind: ResourceKind, name: str, *, is_declared: bool, same: bool, publisher: str, publisher_live: bool, adopt: bool
) -> Outcome:
    """Returns the outcome of a declaration. Raises ALREADY_EXISTS if an active runner publishes it differently.

    `publisher` is the runner that publishes a resource with this name, or "". `same`: whether the declaration equals
    the existing one, or if there is none, the publication.
    """
    if is_declared:
        return Outcome.UNCHANGED if same else Outcome.CONFIGURED
    if not publisher:
        return Outcome.CREATED
    if adopt:
        return Outcome.CONFIGURED
    if same:
        return Outcome.UNCHANGED
    if publisher_live:
        raise WeftError(
            Reason.ALREADY_EXISTS,
            f"the {kind.value} {name!r} is published by the runner {publisher!r} and differs from this declaration; "
            "adopt it (`weft apply --adopt`, or `adopt: true` over HTTP) to take it over",
            metadata={"owner_kind": kind.value, kind.value: name, "runner": publisher},
        )
    return Outcome.CONFIGURED


def in_use(kind: ResourceKind, name: str, users: Mapping[ResourceKind, Collection[str]]) -> WeftError:
    """Returns the error for deleting a resource that others refer to; `users` are their names by kind."""
    found = {user.plural: sorted(names) for user, names in users.items() if names}
    listed = [f"{user}: {_listed(names)}" for user, names in found.items()]
    named = {user: ",".join(names[:MAX_LISTED_NAMES]) for user, names in found.items()}
    return WeftError(
        Reason.RESOURCE_IN_USE,
        f"the {kind.value} {name!r} is in use by {'; by '.join(listed)}; delete them or point them elsewhere",
        metadata={kind.value: name, **named},
    )


def still_loaded(kind: ResourceKind, name: str, runner: str, models: Sequence[str]) -> WeftError:
    """Returns the error for deleting what an active runner has loaded, since its engines would become unowned."""
    if kind is ResourceKind.RUNNER:
        what = f"the runner {name!r} is live and has {_listed(sorted(models))} loaded; stop it or unload them first"
    else:
        what = (
            f"the model {name!r} is published by the live runner {runner!r} and loaded there; unload it "
            f"(`weft unload {name}`), or remove it from that runner's weft.yaml"
        )
    return WeftError(
        Reason.RESOURCE_IN_USE,
        f"{what}, or delete with force (`--force`, or `?force=true` over HTTP), which unloads first",
        metadata={kind.value: name, "runner": runner, "loaded": ",".join(sorted(models)[:MAX_LISTED_NAMES])},
    )


def _listed(names: list[str]) -> str:
    some = ", ".join(names[:MAX_LISTED_NAMES])
    return f"{some} and {len(names) - MAX_LISTED_NAMES} more" if len(names) > MAX_LISTED_NAMES else some


@dataclass(frozen=True, slots=True, kw_only=True)
class Author:
    """The author of a declaration."""

    name: str = ""
    """Becomes the owner of created resources; empty: the machine or a service, which own nothing."""
    own_only: bool = False
    """Whether it may only set itself as the owner, and only of resources that it owns or creates."""


def settled_owner(given: str, author: Author, *, earlier: str | None, field: str) -> str:
    """Returns the owner after a declaration with the owner `given`; empty: none given.

    `earlier` is the current owner; None: the resource does not exist. Raises PERMISSION_DENIED naming the field.
    """
    if not given:
        return author.name if earlier is None else earlier
    if given == earlier or not author.own_only:
        return given
    if earlier in (None, author.name) and given == author.name:
        return given
    if earlier == author.name and author.name:
        # The owner may transfer it.
        return given
    whose = f"it is {earlier}'s" if earlier else "it has no owner"
    why = whose if earlier is not None else "the key may own what it creates itself, and name no other owner"
    raise FieldError(field, f"{why}; only a key with the scope models:edit sets owners", Reason.PERMISSION_DENIED)
