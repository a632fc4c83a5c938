"""Resources as documents: `apply` takes the declared fields; `status` holds observed state and is read-only."""

import re
from collections.abc import Sequence
from datetime import datetime
from ipaddress import IPv4Address
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator

from weft.dispatch.parameter_checks import (
    MAX_AGENT_SIGNALS,
    MAX_AGENT_TOOLS,
    MAX_SIGNAL_NAME_CHARS,
    MAX_TOOL_ITERATIONS,
    SIGNAL_NAME_PATTERN,
    SIGNAL_NAME_RULE,
    is_signal_name,
)
from weft.documents.document_base import MAX_INT32, Count, DescribedModel, DocumentPart, Name, ResourceKind
from weft.documents.statuses import AgentStatus, ModelStatus, PoolStatus, RouteStatus, RunnerStatus
from weft.kernel.errors import FieldError
from weft.kernel.request import Operation, OperationName
from weft.kernel.units import MAX_DURATION_CHARS, keep_alive_seconds
from weft.wake.recipes import DEFAULT_BROADCAST_ADDRESS, DEFAULT_MAX_WAIT_SECONDS, DEFAULT_WAKE_PORT, MAX_WAIT_SECONDS

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_LOGIT_BIASES = 300

Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


def _token_ids(value: Any) -> Any:
    """Keys of JSON objects are strings, also where they are numbers."""
    if not isinstance(value, dict):
        return value
    return {int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key: value[key] for key in value}


class SamplingDocument(DescribedModel):
    """Parameters for requests that leave them out. One that is absent is the backend's own default."""

    model_config = ConfigDict(
        defer_build=True, extra="forbid", strict=True, frozen=True, allow_inf_nan=False, hide_input_in_errors=True
    )

    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    """The most tokens to generate per choice."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """Softmax temperature; 0 is greedy."""
    top_p: Share | None = None
    """Nucleus sampling mass."""
    top_k: Count | None = None
    """Keep only this many most likely tokens; 0 switches it off."""
    min_p: Share | None = None
    """Drop tokens less likely than this share of the most likely one."""
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    """Seed of the sampler."""
    stop: tuple[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)], ...] = Field(
        default=(), max_length=MAX_STOP_STRINGS, strict=False
    )
    """Strings that end a choice."""
    presence_penalty: Penalty | None = None
    """Penalty for tokens already present."""
    frequency_penalty: Penalty | None = None
    """Penalty by how often a token occurred."""
    repeat_penalty: Annotated[float, Field(ge=0, le=2)] | None = None
    """Multiplicative repetition penalty; 1 switches it off."""
    logit_bias: Annotated[
        dict[Annotated[int, Field(ge=0, le=MAX_INT32)], Annotated[float, Field(ge=-100, le=100)]],
        BeforeValidator(_token_ids),
        Field(max_length=MAX_LOGIT_BIASES),
    ] = {}  # noqa: RUF012 - pydantic copies it
    """Added to a token's logit, by token id."""


def _signal_name(text: str) -> str:
    if not is_signal_name(text):
        raise ValueError(SIGNAL_NAME_RULE)
    return text


def _once_each(names: tuple[str, ...]) -> tuple[str, ...]:
    twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if twice is not None:
        raise ValueError(f"must not have {twice} twice")
    return names


def _off_is_a_word(value: Any) -> Any:
    """YAML reads a bare `off` as false."""
    return "off" if value is False else value


SignalName = Annotated[
    str,
    AfterValidator(_signal_name),
    Field(json_schema_extra={"pattern": SIGNAL_NAME_PATTERN, "minLength": 1, "maxLength": MAX_SIGNAL_NAME_CHARS}),
]
SignalNames = Annotated[
    tuple[SignalName, ...], Field(max_length=MAX_AGENT_SIGNALS, strict=False), AfterValidator(_once_each)
]
ToolNames = Annotated[tuple[Name, ...], Field(max_length=MAX_AGENT_TOOLS, strict=False), AfterValidator(_once_each)]
ToolIterations = Annotated[int, Field(ge=0, le=MAX_TOOL_ITERATIONS)]
Repetition = Annotated[Literal["off", "warn", "kill"], BeforeValidator(_off_is_a_word)]


MAX_URL_CHARS = 2048
MAX_HEADERS = 32
MAX_HEADER_NAME_CHARS = 128
MAX_HEADER_VALUE_CHARS = 4096
MAX_ARGUMENTS = 64
MAX_ARGUMENT_CHARS = 4096
MAX_PORT = 65_535

_MAC_ADDRESS = re.compile(r"[0-9A-Fa-f]{2}([:-][0-9A-Fa-f]{2}){5}")


def _mac_address(text: str) -> str:
    if _MAC_ADDRESS.fullmatch(text) is None:
        raise ValueError("must be six pairs of hex digits joined by ':' or '-'")
    return text


def _ipv4_address(text: str) -> str:
    IPv4Address(text)
    return text


class HttpRecipeDocument(DocumentPart):
    """An HTTP request to a controller that starts the backend; every 2xx is success."""

    type: Literal["http"]
    """An HTTP request."""
    url: Annotated[str, Field(pattern=r"^https?://[^\s]+$", max_length=MAX_URL_CHARS, repr=False)]
    """Where to; http or https."""
    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"] = "POST"
    """The request's method."""
    headers: dict[
        Annotated[str, Field(min_length=1, max_length=MAX_HEADER_NAME_CHARS)],
        Annotated[str, Field(max_length=MAX_HEADER_VALUE_CHARS)],
    ] = Field(default={}, max_length=MAX_HEADERS, repr=False)
    """Headers. In a value, `${WEFT_WAKE_...}` stands for that environment variable of the router."""


class CommandRecipeDocument(DocumentPart):
    """A program, started directly and never through a shell; exit code 0 is success."""

    type: Literal["command"]
    """A program."""
    argv: tuple[Annotated[str, Field(max_length=MAX_ARGUMENT_CHARS)], ...] = Field(
        min_length=1, max_length=MAX_ARGUMENTS, strict=False, repr=False
    )
    """The program and its arguments."""


class WakeOnLanRecipeDocument(DocumentPart):
    """A magic packet to a sleeping network card."""

    type: Literal["wake_on_lan"]
    """A magic packet."""
    mac_address: Annotated[str, AfterValidator(_mac_address)]
    """Hardware address, six pairs of hex digits joined by ':' or '-'."""
    broadcast_address: Annotated[str, AfterValidator(_ipv4_address)] = DEFAULT_BROADCAST_ADDRESS
    """IPv4 address to send to."""
    port: Annotated[int, Field(ge=1, le=MAX_PORT)] = DEFAULT_WAKE_PORT
    """UDP port."""


RecipeDocument = HttpRecipeDocument | CommandRecipeDocument | WakeOnLanRecipeDocument


class WakeDocument(DocumentPart):
    """Who can wake a sleeping model. At least one of `byRunner` and `byMesh` is given."""

    by_runner: bool = False
    """Its runner wakes it when asked."""
    by_mesh: Annotated[RecipeDocument, Field(discriminator="type")] | None = None
    """What a router does to wake the host the runner lives on: a sleeping host cannot wake itself."""
    max_wait_seconds: Annotated[float, Field(ge=1, le=MAX_WAIT_SECONDS)] = DEFAULT_MAX_WAIT_SECONDS
    """Longest wait from the first step until the model takes requests."""

    @model_validator(mode="after")
    def _somebody_wakes_it(self) -> "WakeDocument":
        if not self.by_runner and self.by_mesh is None:
            raise ValueError("needs byRunner: true, or a recipe in byMesh")
        return self


MAX_DESCRIPTION_CHARS = 1024
MAX_SYSTEM_PROMPT_CHARS = 65_536
MAX_POOL_MEMBERS = 10_000
MAX_OPERATIONS = len(Operation)
MAX_SKILLS = 8

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


MAX_CANDIDATES = 16
MAX_BUDGET_SECONDS = 86_400.0


def _length(value: object) -> float:
    try:
        return keep_alive_seconds(value, "")
    except FieldError as error:
        raise ValueError(error.message.removeprefix(": ")) from None


def _whole(seconds: float) -> int | float:
    """A number as people write it: 300, not 300.0."""
    return int(seconds) if seconds.is_integer() else seconds


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError("must not name one twice")
    return tuple(names)


_KeepAliveText = Annotated[str, Field(max_length=MAX_DURATION_CHARS)]
_Seconds = PlainSerializer(_whole, return_type=int | float, when_used="json")


class RouteDocument(DocumentPart):
    """A ladder of models for one kind of task. Callers ask for it as model "route/<name>"."""

    kind: Literal["route"]
    """What it is."""
    name: Name
    """Unique in the mesh."""
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION_CHARS)] = ""
    """For people."""
    candidates: Annotated[
        tuple[Name, ...], Field(min_length=1, max_length=MAX_CANDIDATES, strict=False), AfterValidator(_distinct)
    ]
    """Models or pools, by name, best first. The first is the primary, the others are fallbacks."""
    budget_seconds: Annotated[float, Field(gt=0, le=MAX_BUDGET_SECONDS), _Seconds] | None = None
    """How long an answer may take from its arrival to its end, waiting and loads included; a request that would take
    longer is refused at once. Absent: as long as the request's own deadline."""
    keep_alive: (
        Annotated[float, BeforeValidator(_length, json_schema_input_type=float | _KeepAliveText), _Seconds] | None
    ) = None
    """How long the model stays loaded after a request by this route: seconds, a text such as "5m", -1 for ever, 0 for
    one request. Absent: as the model is configured."""
    pin_primary: bool = False
    """Whether the primary is waited and loaded for as long as it is there at all, even where a fallback could answer
    sooner."""
    status: RouteStatus | None = None
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
