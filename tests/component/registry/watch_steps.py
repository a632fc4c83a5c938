"""What may happen to a registry, for random histories: few names, so that they are fought over."""

from dataclasses import dataclass
from enum import Enum, auto

from hypothesis import strategies as st

from weft.documents.resource_kinds import ResourceKind

# Few names, so that they are fought over, between kinds too.
RUNNERS = ("r1", "r2")
MODELS = ("m1", "m2", "m3")
AGENTS = ("a1", "a2", "m3", "p1", "r2")
POOLS = ("", "p1", "m1", "a2")
ROUTES = ("q1", "a1", "m3", "p1", "r2")
CANDIDATES = ("m1", "m2", "p1", "a2")


class Identity(Enum):
    """Whose session id a runner shows."""

    OWN = auto()
    NONE = auto()
    OTHERS = auto()
    """That of the other name: a runner that was renamed."""


@dataclass(frozen=True)
class Open:
    """A runner opens a session."""

    runner: str
    models: frozenset[str]
    identity: Identity
    pool: str = ""
    agents: frozenset[str] = frozenset()
    target: str = "m1"
    wakeable: bool = False


@dataclass(frozen=True)
class Beat:
    runner: str
    slots_used: int
    sequence_step: int
    asleep: bool = False


@dataclass(frozen=True)
class Close:
    runner: str


@dataclass(frozen=True)
class Wait:
    seconds: float


@dataclass(frozen=True)
class Declare:
    """An operator applies a model and an agent that points to its pool."""

    model: str
    pool: str
    runner: str
    agent: str
    adopt: bool


@dataclass(frozen=True)
class DeclareRoute:
    """An operator applies a route."""

    name: str
    candidates: frozenset[str]
    pinned: bool


@dataclass(frozen=True)
class Allow:
    """An operator says whether routes may leave the premises."""

    cloud_fallback: bool


@dataclass(frozen=True)
class Delete:
    kind: ResourceKind
    name: str


@dataclass(frozen=True)
class Restart:
    """The registry ends and another one starts on the same store."""


OperatorStep = Declare | DeclareRoute | Allow | Delete
Step = Open | Beat | Close | Wait | Restart | OperatorStep

runner_names = st.sampled_from(RUNNERS)
openings = st.builds(
    Open,
    runner_names,
    st.frozensets(st.sampled_from(MODELS)),
    st.sampled_from(list(Identity)),
    st.sampled_from(POOLS),
    st.frozensets(st.sampled_from(AGENTS), max_size=2),
    st.sampled_from(("m1", "m2", "p1")),
    st.booleans(),
)
declarations = st.builds(
    Declare,
    st.sampled_from((*MODELS, "a1", "r1")),
    st.sampled_from(POOLS),
    st.sampled_from(("", *RUNNERS)),
    st.sampled_from(AGENTS),
    st.booleans(),
)
routes = st.builds(
    DeclareRoute,
    st.sampled_from(ROUTES),
    st.frozensets(st.sampled_from(CANDIDATES), min_size=1, max_size=3),
    st.booleans(),
)
deletions = st.builds(
    Delete,
    st.sampled_from([ResourceKind.MODEL, ResourceKind.AGENT, ResourceKind.RUNNER, ResourceKind.ROUTE]),
    st.sampled_from((*RUNNERS, *MODELS, *AGENTS, "q1")),
)
steps = st.lists(
    st.one_of(
        openings,
        openings,
        st.builds(Beat, runner_names, st.integers(0, 2), st.integers(-1, 2), st.booleans()),
        declarations,
        routes,
        deletions,
        st.builds(Allow, st.booleans()),
        st.builds(Close, runner_names),
        st.builds(Wait, st.sampled_from([5.0, 60.0, 90.0, 14_400.0])),
        st.builds(Restart),
    ),
    min_size=15,
    max_size=45,
)
