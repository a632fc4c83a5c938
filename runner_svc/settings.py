"""The settings of a runner in `weft.yaml`, with those of its agents and signals. Models: `runtimes/settings.py`.

`weft_app.config` reads the file into these classes, and `weft_app.compose` builds a `RunnerConfig` from them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Ge, Le, MaxLen, MinLen

from runner_svc.chat.settings import ChatSettings
from runner_svc.policy.backoff import RestartLimits
from runner_svc.policy.timeouts import StopGraces, TimeoutProfile
from runner_svc.runtimes.runtime import Runtime
from runner_svc.runtimes.settings import (
    MAX_LABELS,
    LabelKey,
    LabelValue,
    ModelSettings,
    Owner,
    Repetition,
    SleepingModelSettings,
    Tier,
)
from runner_svc.runtimes.table import DEFAULT_RUNTIME, require_runtime
from runner_svc.tools.port import ToolSettings
from weft.kernel.errors import FieldError
from weft.kernel.settings import PUBLIC, SECRET, Checked, ModelName, Name, Pattern, Port, Seconds, SizeText
from weft.kernel.units import parse_size

_CHAT = ChatSettings()
_GRACES = StopGraces()
_RESTART = RestartLimits()
_TIMEOUTS = TimeoutProfile()


DEFAULT_MAX_LISTED_MODELS = 1_024
DEFAULT_DEVICE_SAMPLE_SECONDS = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStoreSettings:
    """Models that are pulled by name, which lie in `models` under the home."""

    disk_limit: Annotated[SizeText, PUBLIC] | None = None
    """Most disk that all of them may take, such as `200GiB`; a pull over it is refused before it begins. Default: no
    limit but the disk, of which 256 MiB stay free."""
    allow_http: bool = False
    """Whether a pull may ask other machines without encryption."""

    @property
    def disk_limit_bytes(self) -> int | None:
        """The limit in bytes; None: no limit but the disk."""
        return None if self.disk_limit is None else parse_size(self.disk_limit, "model_store.disk_limit")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """An agent that the runner publishes with its models."""

    name: Annotated[Name, PUBLIC]
    """Unique in the mesh; requests name `agent/<name>`."""
    model: Annotated[ModelName | None, PUBLIC] = None
    """The model that answers; set this ..."""
    pool: Annotated[ModelName | None, PUBLIC] = None
    """... or the pool that answers."""
    description: Annotated[str, MaxLen(1024), PUBLIC] = ""
    """For people."""
    tier: Annotated[Tier, PUBLIC] | None = None
    """How it ranks, as of a model."""
    labels: Annotated[Mapping[LabelKey, LabelValue], MaxLen(MAX_LABELS), PUBLIC] = field(default_factory=dict)
    """Labels by which commands select it."""
    owner: Annotated[Owner, PUBLIC] | None = None
    """Who answers for it."""
    system_prompt: Annotated[str, MaxLen(65_536), PUBLIC] = ""
    """Put before the conversation."""
    default_params: Annotated[Mapping[str, Any], MaxLen(64), PUBLIC] = field(default_factory=dict)
    """Parameters of requests that leave them out, such as `temperature: 0.2`."""
    platform_prompt: bool = False
    """Begin the conversation with the platform's own prompt: the mesh, date and time, tool budget, how to signal."""
    tools: Annotated[tuple[Name, ...], MaxLen(64), PUBLIC] = ()
    """Tools that the mesh runs for the model; the runner that answers must have them in its `tools`."""
    max_tool_iterations: Annotated[int, Ge(0), Le(64)] | None = None
    """Further turns of the model with the results of tools. Default: the runner's."""
    signals: Annotated[tuple[Annotated[str, MaxLen(64)], ...], MaxLen(64)] = ()
    """Control signals that the model may raise, such as `NEEDS_HIGHER_REASONER`."""
    stop_on_decision_request: bool = True
    """Whether a signal that asks for a decision ends the answer."""
    repetition: Repetition | None = None
    """What happens to an answer that repeats itself. Default: the model's."""
    parse_text_tool_calls: bool = True
    """Whether calls that the model writes as text count as calls."""

    def __post_init__(self) -> None:
        if (self.model is None) == (self.pool is None):
            raise ValueError("an agent needs either model or pool")


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalSettings:
    """A control signal of the operator's own, besides the built-in ones."""

    name: Annotated[str, Pattern(r"^[A-Z][A-Z0-9_]{0,63}$"), PUBLIC]
    """In capitals, such as `NEEDS_LEGAL_REVIEW`."""
    description: Annotated[str, MinLen(1), MaxLen(1024), PUBLIC]
    """When to raise it, for the model to read."""
    parameters: Annotated[Mapping[str, Any], MaxLen(16)] = field(default_factory=dict)
    """JSON schema of its arguments. Default: a `reason`."""
    asks_for_decision: bool = False
    """Whether it ends the answers of agents with `stop_on_decision_request`."""


def _name_of_installed(name: str) -> str:
    try:
        return require_runtime(name).name
    except FieldError as refused:
        raise ValueError(refused.message.removeprefix(f"{refused.field}: ")) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSettings:
    """One runner process."""

    name: Annotated[Name, PUBLIC]
    """Unique in the mesh."""
    runtime: Annotated[str, Checked(_name_of_installed), PUBLIC] = DEFAULT_RUNTIME
    """The kind of engine: llama.cpp's server or llama-cpp-python, which weft starts, an OpenAI-compatible server that
    runs already, the models of a remote provider, or one that another package adds, see docs/engines.md;
    `weft doctor` lists them."""
    command: Annotated[tuple[str, ...] | None, PUBLIC] = None
    """The server program and its first arguments. Default: `llama-server` on PATH, else the xllamacpp launcher. For
    llama_cpp_python and ctranslate2: an interpreter that has the library, the path of weft's
    `runner_svc/engine_host/bootstrap.py`, and `runner_svc.runtimes.llama_cpp_python.server` or
    `runner_svc.runtimes.ctranslate2.server`. Default of ctranslate2: the environment of `weft runtime install
    ctranslate2`."""
    url: Annotated[str, MaxLen(2048), PUBLIC, SECRET] | None = field(default=None, repr=False)
    """Base URL of a server that runs already, such as `http://127.0.0.1:11434`. Without `models` every model that the
    server lists is served, and the list is followed; models without a `url` have this one."""
    api_key_env: Annotated[str, MaxLen(128), PUBLIC] | None = None
    """With `url`: environment variable that holds the server's key."""
    remote: bool | None = None
    """With `url` and without `models`: whether serving its models sends bytes to a remote provider. Required if
    the address is outside your own networks."""
    max_listed_models: Annotated[int, Ge(1), Le(1024), PUBLIC] = DEFAULT_MAX_LISTED_MODELS
    """With `url` and without `models`: so many models of the server's list are served, the first ones."""
    models: Annotated[tuple[ModelSettings, ...], PUBLIC]
    """What it serves, one process each, by the settings class of its runtime."""
    agents: Annotated[tuple[AgentSettings, ...], MaxLen(256), PUBLIC] = ()
    """Agents it publishes with its models."""
    max_requests: Annotated[int, Ge(1), Le(65_536)] | None = None
    """Requests it works on concurrently over all its models. Default: as many as its slots."""
    devices: Annotated[tuple[Annotated[int, Ge(0), Le(63)], ...], MaxLen(64), PUBLIC] = ()
    """Accelerators of the host that it may use, by number in the order of the PCI bus. Default: those that
    CUDA_VISIBLE_DEVICES names, or all."""
    worker_hosts: Annotated[tuple[Annotated[str, Pattern(r"^[!-~]{1,255}$")], ...], MaxLen(256), PUBLIC] = ()
    """Other hosts that have a part of its models, where an engine runs on several: their names as `hostname` prints
    them there. The pools of all these hosts are scheduled together. See docs/models.md."""
    port_range: Annotated[str, Pattern(r"^\d{1,5}-\d{1,5}$")] | None = None
    """Ports that engines listen on, such as `41000-41099`, where others are closed. Default: any free one."""
    http_port: Annotated[Port | None, PUBLIC] = None
    """Loopback port of this runner's own HTTP API, see docs/api.md; 0 takes a free one. Default: it has none."""
    memory_wait_seconds: Seconds = 300.0
    """Longest wait of a load for accelerator memory."""
    probe_interval_seconds: Seconds = 5.0
    """For openai_http: interval of the probes of the server."""
    probe_failures: Annotated[int, Ge(1), Le(1000)] = 3
    """For openai_http: probes in a row that must fail before the server counts as gone."""
    load_stall_seconds: Seconds = 300.0
    """Time without output and without CPU time after which a load is given up."""
    connect_timeout_seconds: Seconds = _TIMEOUTS.connect_seconds
    """Longest wait for a connection to the engine."""
    headers_timeout_seconds: Seconds | None = _TIMEOUTS.headers_seconds
    """Longest wait for response headers. Off: llama-server sends them with the first token."""
    first_token_timeout_seconds: Seconds | None = _TIMEOUTS.first_token_seconds
    """Longest wait for the first token, however busy the engine is. Off: a long prompt takes its time."""
    prefill_liveness_timeout_seconds: Seconds | None = _TIMEOUTS.prefill_liveness_seconds
    """Longest time without progress before the first token: prefill progress, CPU or GPU time of the engine."""
    idle_stream_timeout_seconds: Seconds = _TIMEOUTS.idle_stream_seconds
    """Longest time without a token once the answer has begun."""
    absolute_timeout_seconds: Seconds | None = _TIMEOUTS.absolute_seconds
    """Longest time for a whole request, tools included. Off."""
    first_term_seconds: Seconds = _GRACES.first_term_seconds
    """Grace after the first SIGTERM; a second one follows, and SIGKILL 2 s after that."""
    max_deaths: Annotated[int, Ge(1), Le(1000)] = _RESTART.max_deaths
    """A crash loop is this many deaths within half a minute."""
    first_pause_seconds: Seconds = _RESTART.first_pause_seconds
    """Pause after a crash loop; doubles with every further one, up to five minutes."""
    tools: Annotated[tuple[ToolSettings, ...], MaxLen(64), PUBLIC] = ()
    """Tools that the runner can run for models and agents that list them."""
    signals: Annotated[tuple[SignalSettings, ...], MaxLen(32)] = ()
    """Control signals besides the built-in ones."""
    max_tool_iterations: Annotated[int, Ge(0), Le(64)] = _CHAT.max_tool_iterations
    """Further turns of a model with the results of tools, where its agent sets no number."""
    time_zone: Annotated[str, MaxLen(64)] | None = None
    """Zone of the date and time in the platform prompt, such as `Europe/Berlin`. Default: the machine's."""
    platform_prompt: bool = _CHAT.platform_prompt
    """Begin every chat with its models with the platform's own prompt, as if each agent asked for it; a model may say
    otherwise. Translations and models that do not chat get none."""
    platform_context: Annotated[str, MaxLen(8192)] = _CHAT.platform_context
    """What the platform prompt says about your mesh, for the model to read."""

    def __post_init__(self) -> None:
        for model in self.models:
            sleep = model.sleep if isinstance(model, SleepingModelSettings) else None
            if sleep is not None and sleep.type == "unload" and not self.engine.starts_engines:
                raise ValueError(f"model {model.name} cannot be unloaded: weft did not start its server")

    @property
    def engine(self) -> Runtime[Any]:
        """The descriptor of its runtime."""
        return require_runtime(self.runtime)

    @property
    def follows_server(self) -> bool:
        """Whether it serves the models that a server lists."""
        return self.url is not None and not self.models

    @property
    def published_models(self) -> tuple[ModelSettings, ...]:
        """The models that the mesh lists by default: those without `publish: false`."""
        return tuple(model for model in self.models if model.publish is not False)

    @property
    def timeouts(self) -> TimeoutProfile:
        """The timeouts of its engines and their requests."""
        return TimeoutProfile(
            connect_seconds=self.connect_timeout_seconds,
            headers_seconds=self.headers_timeout_seconds,
            first_token_seconds=self.first_token_timeout_seconds,
            prefill_liveness_seconds=self.prefill_liveness_timeout_seconds,
            idle_stream_seconds=self.idle_stream_timeout_seconds,
            absolute_seconds=self.absolute_timeout_seconds,
        )

    @property
    def graces(self) -> StopGraces:
        """The grace periods for ending an engine."""
        return StopGraces(first_term_seconds=self.first_term_seconds)

    @property
    def restart(self) -> RestartLimits:
        """The crash loop limits of its engines."""
        return RestartLimits(
            max_deaths=self.max_deaths,
            first_pause_seconds=self.first_pause_seconds,
        )
