"""Resources as documents. What stands outside `status` is declared, and `apply` takes it; `status` is told only."""

from datetime import datetime
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from weft.documents.behaviour_words import Repetition, SignalNames, ToolIterations, ToolNames
from weft.documents.document_base import Count, DocumentPart, Name
from weft.documents.kinds import ResourceKind
from weft.documents.route_document import RouteDocument
from weft.documents.sampling_document import SamplingDocument
from weft.documents.statuses import AgentStatus, ModelStatus, PoolStatus, RunnerStatus
from weft.documents.wake_document import WakeDocument

MAX_DESCRIPTION_CHARS = 1024
MAX_SYSTEM_PROMPT_CHARS = 65_536
MAX_POOL_MEMBERS = 10_000
MAX_OPERATIONS = 8
MAX_SKILLS = 8

OperationName = Literal["chat", "completion", "embedding", "rerank", "tokenize", "image", "transcription", "speech"]
SkillName = Literal["text", "image", "audio", "tools"]
MESH: Final = "mesh"
"""Stands for the kind of resource where an event is about the mesh itself."""
DEFAULT_OPERATIONS: tuple[OperationName, ...] = ("chat", "completion")


class ModelDocument(DocumentPart):
    """A model."""

    kind: Literal["model"]
    """What it is."""
    name: Name
    """Unique in the mesh."""
    pool_name: Name | None = None
    """Models of one pool answer for each other. Absent: a pool of its own, named like the model."""
    runner: Name | None = None
    """The one runner that may serve it. Absent: the first live one that publishes this name."""
    operations: tuple[OperationName, ...] = Field(
        default=DEFAULT_OPERATIONS, min_length=1, max_length=MAX_OPERATIONS, strict=False
    )
    """What it can be asked for."""
    context_tokens: Count = 0
    """Context of one slot, prompt and answer together. 0: unknown until loaded."""
    digest: Annotated[str, Field(pattern=r"^(sha256:[0-9a-f]{64})?$")] = ""
    """Digest of the model file, "sha256:" and 64 hex digits, or empty."""
    remote: bool = False
    """Whether serving it sends bytes off the premises."""
    wake: WakeDocument | None = None
    """Who can wake it when it sleeps. Absent: it never sleeps."""
    skills: tuple[SkillName, ...] = Field(default=(), max_length=MAX_SKILLS, strict=False)
    """What it can do beyond text; `text` stands there where it takes text besides. Empty: unknown, and it is asked for
    everything."""
    status: ModelStatus | None = None
    """What is true of it now; ignored by `apply`."""


class AgentDocument(DocumentPart):
    """A named persona over a model or a pool. Callers ask for it as model "agent/<name>"."""

    kind: Literal["agent"]
    """What it is."""
    name: Name
    """Unique in the mesh."""
    model: Name | None = None
    """Who answers: this model, and with it every member of the pool that it is in; or ..."""
    pool: Name | None = None
    """... any member of this pool. Exactly one of the two is given."""
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION_CHARS)] = ""
    """For people."""
    system_prompt: Annotated[str, Field(max_length=MAX_SYSTEM_PROMPT_CHARS)] = ""
    """Put before the conversation as a system message."""
    default_params: SamplingDocument = SamplingDocument()
    """Used where a request leaves a parameter out."""
    platform_prompt: bool = False
    """Whether the conversation begins with the platform's own system prompt: the mesh, date and time, tool budget, and
    how to signal."""
    tools: ToolNames = ()
    """Tools that the mesh runs for the model; the runner that answers must have them."""
    max_tool_iterations: ToolIterations | None = None
    """How many times the model may be asked again with results of tools. Absent: the runner's own limit."""
    signals: SignalNames = ()
    """Control signals that the model may raise, such as NEEDS_HIGHER_REASONER."""
    stop_on_decision_request: bool = True
    """Whether a signal that asks for a decision ends the answer."""
    repetition: Repetition | None = None
    """What happens to an answer that repeats itself over and over. Absent: the model's own setting."""
    parse_text_tool_calls: bool = True
    """Whether calls that the model writes as text, in a form that many models use, count as calls."""
    status: AgentStatus | None = None
    """What is true of it now; ignored by `apply`."""

    @model_validator(mode="after")
    def _has_one_target(self) -> "AgentDocument":
        if (self.model is None) == (self.pool is None):
            raise ValueError("needs exactly one of model and pool")
        return self


class RunnerDocument(DocumentPart):
    """A runner. Runners register themselves: `apply` checks that it exists and changes nothing."""

    kind: Literal["runner"]
    """What it is."""
    name: Name
    """Unique in the mesh."""
    status: RunnerStatus | None = None
    """What is true of it now; ignored by `apply`."""


class PoolDocument(DocumentPart):
    """A pool. Pools follow from their models: `apply` checks that it is as declared and changes nothing."""

    kind: Literal["pool"]
    """What it is."""
    name: Name
    """The name its models give in `poolName`, or that of its only model."""
    members: tuple[Name, ...] = Field(default=(), max_length=MAX_POOL_MEMBERS, strict=False)
    """Its members, by name, in order. Empty: whoever they are."""
    status: PoolStatus | None = None
    """What is true of it now; ignored by `apply`."""


class EventDocument(DocumentPart):
    """One thing that happened to a resource, or to the mesh itself."""

    kind: Literal["event"]
    """What it is."""
    sequence: int
    """Counts up by one with every event of one registry life."""
    time: datetime
    """When, by the registry's clock."""
    resource_kind: ResourceKind | Literal["mesh"]
    """What kind of resource it happened to; "mesh": to the mesh itself."""
    resource_name: str
    """The resource's name; for the mesh itself what of it, such as "settings"."""
    reason: str
    """What happened, in one word for programs, such as "registered"."""
    message: str
    """The same in words, for people."""


Document = ModelDocument | AgentDocument | RunnerDocument | PoolDocument | RouteDocument

DOCUMENT_TYPES: dict[ResourceKind, type[Document]] = {
    ResourceKind.MODEL: ModelDocument,
    ResourceKind.AGENT: AgentDocument,
    ResourceKind.RUNNER: RunnerDocument,
    ResourceKind.POOL: PoolDocument,
    ResourceKind.ROUTE: RouteDocument,
}


def kind_of(document: Document) -> ResourceKind:
    """Its kind, as an enum."""
    return ResourceKind(document.kind)
