"""What operators want there to be, and what became of it, as immutable values."""

from dataclasses import dataclass
from enum import IntEnum

from registry_svc.mesh.domain import AgentManifest, Kind, Manifest, RouteManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDeclaration:
    """The wanted state of a public model."""

    manifest: Manifest
    runner: str
    """The one runner that may serve it; empty: any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerDeclaration:
    """A runner that is said to be there."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDeclaration:
    """A pool that is said to be there."""

    name: str
    members: tuple[str, ...]
    """Empty: whoever they are."""


Declaration = ModelDeclaration | AgentManifest | RouteManifest | RunnerDeclaration | PoolDeclaration


class Outcome(IntEnum):
    """What became of a declaration; numbers as in `registry.v1.ApplyResult.Outcome`."""

    CREATED = 1
    CONFIGURED = 2
    UNCHANGED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What became of one declaration."""

    kind: Kind
    name: str
    outcome: Outcome
    before: Declaration | None
    """None: it did not exist."""
    after: Declaration


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A validated Apply: declarations in their order, no two of one name."""

    declarations: tuple[Declaration, ...]
    dry_run: bool
    adopt: bool
