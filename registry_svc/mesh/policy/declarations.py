"""Declarations: their outcome, and whether the targets of agents and the candidates of routes exist."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from registry_svc.mesh.domain import Kind, Outcome
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.unknown_names import MODEL_OR_POOL, unknown_name, unknown_target


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Present state of the model or pool that an agent targets."""

    agent: str
    """The name of the agent."""
    name: str
    """The name of its target."""
    is_pool: bool
    """Whether that is a pool; else a model."""
    model_known: bool
    """Whether there is a model of the target's name."""
    pool_members: Collection[str]
    """The members of the pool of the target's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Present state of the model or pool that a route names."""

    name: str
    model_known: bool
    """Whether there is a model of this name."""
    pool_members: Collection[str]
    """The members of the pool of this name."""

    def exists(self, *, arriving: Mapping[str, str], leaving: Collection[str]) -> bool:
        """Whether it exists once the models `arriving` (pool by name) were added and those `leaving` removed."""
        if self.name in arriving or self.name in arriving.values():
            return True
        if self.model_known and self.name not in leaving:
            return True
        return any(member not in leaving and member not in arriving for member in self.pool_members)


def exists(target: Target, *, arriving: Mapping[str, str], leaving: Collection[str]) -> bool:
    """Whether the target exists once the models `arriving` (pool by name) were added and those `leaving` removed."""
    if not target.is_pool:
        return target.name in arriving or (target.model_known and target.name not in leaving)
    if target.name in arriving.values():
        return True
    return any(member not in leaving and member not in arriving for member in target.pool_members)


def require_target(
    target: Target, *, arriving: Mapping[str, str], leaving: Collection[str], names: Callable[[Kind], Iterable[str]]
) -> None:
    """Raise MODEL_NOT_FOUND when the target of an agent does not exist; `names` are those that its author may see."""
    if exists(target, arriving=arriving, leaving=leaving):
        return
    kind = Kind.POOL if target.is_pool else Kind.MODEL
    error = unknown_name(kind.value, target.name, names(kind))
    raise _absent("agent", target.agent, "target", error, {kind.value: target.name})


def require_candidates(
    route: str, candidates: Sequence[Candidate], *, arriving: Mapping[str, str], names: Callable[[], Iterable[str]]
) -> None:
    """Raise MODEL_NOT_FOUND when a route would name something that is not there; `names` as for `require_target`."""
    for candidate in candidates:
        if not candidate.exists(arriving=arriving, leaving=()):
            error = unknown_name(MODEL_OR_POOL, candidate.name, names())
            raise _absent("route", route, "candidate", error, {"candidate": candidate.name})


def require_alias_target(alias: str, target: str, *, is_known: bool, names: Callable[[], Iterable[str]]) -> None:
    """Raise MODEL_NOT_FOUND when an alias would lead to something that is not there, such as another alias.

    `names` are those of the requests that its author may send, with prefixes.
    """
    if not is_known:
        raise _absent(
            "alias", alias, "target (never another alias)", unknown_target(target, names()), {"target": target}
        )


def require_workflow_model(workflow: str, model: str, *, is_known: bool, names: Callable[[], Iterable[str]]) -> None:
    """Raise MODEL_NOT_FOUND when a workflow would be run by something that is not there; `names` as above."""
    if not is_known:
        error = unknown_name(MODEL_OR_POOL, model, names())
        raise _absent("workflow", workflow, "model", error, {"model": model})


def _absent(kind: str, name: str, part: str, unknown: WeftError, named: Mapping[str, str]) -> WeftError:
    return WeftError(
        Reason.MODEL_NOT_FOUND,
        f"the {part} of the {kind} {name!r} is neither in the mesh nor in this call: {unknown.message}",
        metadata={kind: name, **named},
    )


def require_own_pattern(alias: str, pattern: str, other: str) -> None:
    """Raise ALREADY_EXISTS where `other` stands for the same names; empty: none does."""
    if other:
        raise WeftError(
            Reason.ALREADY_EXISTS,
            f"the alias {other!r} stands for {pattern} already; delete it, or change it instead of declaring {alias!r}",
            metadata={"owner_kind": Kind.ALIAS.value, "alias": other},
        )


MAX_LISTED_NAMES = 10


def decide_outcome(
    kind: Kind, name: str, *, is_declared: bool, same: bool, publisher: str, publisher_live: bool, adopt: bool
) -> Outcome:
    """Return the outcome of a declaration; raises ALREADY_EXISTS when a live runner publishes it differently.

    `same`: whether it says what is declared already, or else what `publisher` publishes. `publisher` is the runner that
    publishes a resource of this name; empty: none does.
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


def in_use(
    kind: Kind,
    name: str,
    agents: Collection[str],
    routes: Collection[str] = (),
    aliases: Collection[str] = (),
    workflows: Collection[str] = (),
) -> WeftError:
    """Return the refusal to delete a resource that others point to; one of the others is not empty."""
    found = {"agents": agents, "routes": routes, "aliases": aliases, "workflows": workflows}
    users = {user: sorted(names) for user, names in found.items()}
    listed = [f"{user}: {_listed(names)}" for user, names in users.items() if names]
    named = {user: ",".join(names[:MAX_LISTED_NAMES]) for user, names in users.items() if names}
    return WeftError(
        Reason.RESOURCE_IN_USE,
        f"the {kind.value} {name!r} is in use by {'; by '.join(listed)}; delete them or point them elsewhere",
        metadata={kind.value: name, **named},
    )


def still_loaded(kind: Kind, name: str, runner: str, models: Sequence[str]) -> WeftError:
    """Return the refusal to delete what a live runner has loaded: its engines would hold memory without an owner."""
    if kind is Kind.RUNNER:
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
