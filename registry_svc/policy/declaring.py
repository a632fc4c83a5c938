"""What becomes of a declaration, given what is there."""

from registry_svc.domain import AgentManifest, AgentPublication, DeclaredAgent, DeclaredModel, Kind, Model, Publication
from registry_svc.wanted import ModelDeclaration, Outcome
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

MAX_LISTED_NAMES = 10


def decide_model(
    given: ModelDeclaration,
    *,
    view: Model | None,
    declared: DeclaredModel | None,
    publication: Publication | None,
    publisher_live: bool,
    adopt: bool,
) -> Outcome:
    """What becomes of a declared model; raises ALREADY_EXISTS when a live runner publishes it otherwise.

    What can be read of a public model may hold facts of its publication, and declaring just that changes nothing.
    """
    if declared is not None:
        pinned_alike = given.runner == declared.runner
        same = given.manifest == declared.manifest or (view is not None and given.manifest == view.manifest)
        return Outcome.UNCHANGED if pinned_alike and same else Outcome.CONFIGURED
    if publication is None:
        return Outcome.CREATED
    same = given.manifest == publication.manifest and given.runner in {"", publication.runner}
    return _of_virtual(Kind.MODEL, given.manifest.name, publication.runner, same, publisher_live, adopt)


def decide_agent(
    given: AgentManifest,
    *,
    declared: DeclaredAgent | None,
    publication: AgentPublication | None,
    publisher_live: bool,
    adopt: bool,
) -> Outcome:
    """What becomes of a declared agent; raises ALREADY_EXISTS when a live runner publishes it otherwise."""
    if declared is not None:
        return Outcome.UNCHANGED if given == declared.manifest else Outcome.CONFIGURED
    if publication is None:
        return Outcome.CREATED
    same = given == publication.manifest
    return _of_virtual(Kind.AGENT, given.name, publication.runner, same, publisher_live, adopt)


def in_use(kind: Kind, name: str, agents: set[str]) -> WeftError:
    """The refusal to delete what `agents` point to."""
    listed = sorted(agents)[:MAX_LISTED_NAMES]
    more = f" and {len(agents) - len(listed)} more" if len(agents) > len(listed) else ""
    return WeftError(
        Reason.RESOURCE_IN_USE,
        f"the {kind.value} {name!r} is in use by agents: {', '.join(listed)}{more}; "
        "delete them or point them elsewhere",
        metadata={kind.value: name, "agents": ",".join(listed)},
    )


def _of_virtual(kind: Kind, name: str, runner: str, same: bool, publisher_live: bool, adopt: bool) -> Outcome:
    if adopt:
        return Outcome.CONFIGURED
    if same:
        return Outcome.UNCHANGED
    if publisher_live:
        raise WeftError(
            Reason.ALREADY_EXISTS,
            f"the {kind.value} {name!r} is published by the runner {runner!r} and differs from this declaration; "
            "adopt it (`weft apply --adopt`, or `adopt: true` over HTTP) to take it over",
            metadata={"owner_kind": kind.value, kind.value: name, "runner": runner},
        )
    return Outcome.CONFIGURED
