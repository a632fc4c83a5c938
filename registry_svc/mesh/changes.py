"""What those who watch the mesh are told: everything there is, then each thing that changes."""

from dataclasses import dataclass

from registry_svc.mesh.domain import Agent, MeshSettings, Model, Route, Runner


@dataclass(frozen=True, slots=True)
class RunnerChanged:
    """A runner appeared, or is different now."""

    runner: Runner


@dataclass(frozen=True, slots=True)
class ModelChanged:
    """A model appeared, or is different now."""

    model: Model


@dataclass(frozen=True, slots=True)
class AgentChanged:
    """An agent appeared, or is different now."""

    agent: Agent


@dataclass(frozen=True, slots=True)
class RouteChanged:
    """A route appeared, or is different now."""

    route: Route


@dataclass(frozen=True, slots=True)
class SettingsChanged:
    """The mesh's settings are different now."""

    settings: MeshSettings


@dataclass(frozen=True, slots=True)
class RunnerDeleted:
    """The runner of this name is gone."""

    name: str


@dataclass(frozen=True, slots=True)
class ModelDeleted:
    """The model of this name is gone."""

    name: str


@dataclass(frozen=True, slots=True)
class AgentDeleted:
    """The agent of this name is gone."""

    name: str


@dataclass(frozen=True, slots=True)
class RouteDeleted:
    """The route of this name is gone."""

    name: str


Change = (
    RunnerChanged
    | ModelChanged
    | AgentChanged
    | RouteChanged
    | SettingsChanged
    | RunnerDeleted
    | ModelDeleted
    | AgentDeleted
    | RouteDeleted
)


@dataclass(frozen=True, slots=True)
class Revised:
    """One change, and the revision it made."""

    revision: int
    change: Change


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything there is at one revision."""

    revision: int
    runners: tuple[Runner, ...]
    models: tuple[Model, ...]
    settings: MeshSettings
    agents: tuple[Agent, ...] = ()
    routes: tuple[Route, ...] = ()
