"""The settings of a runner in `weft.yaml`, with those of its agents and signals. Models: `runtime_settings`.

`weft_app.config` reads the file into these classes, and `weft_app.compose` builds a `RunnerConfig` from them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Ge, Le, MaxLen

from runner_svc.chat.chat_settings import ChatSettings
from runner_svc.policy.backoff import RestartLimits
from runner_svc.policy.signals import SignalSettings
from runner_svc.policy.timeouts import StopGraces, TimeoutProfile
from runner_svc.runtimes.runtime import Runtime
from runner_svc.runtimes.runtime_settings import (
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
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.settings.setting_annotations import (
    PUBLIC,
    SECRET,
    Checked,
    ModelName,
    Name,
    Pattern,
    Port,
    Seconds,
    SizeText,
    UrlText,
)
from weft.kernel.values.reach import PLAIN, PROGRAM, TOOL, VARIABLE
from weft.kernel.values.units import parse_size

_CHAT = ChatSettings()
_GRACES = StopGraces()
_RESTART = RestartLimits()
_TIMEOUTS = TimeoutProfile()


DEFAULT_MAX_LISTED_MODELS = 1_024
DEFAULT_DEVICE_SAMPLE_SECONDS = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStoreSettings:
    """Pulled models, stored in `models` under the home."""

    disk_limit: Annotated[SizeText, PUBLIC] | None = None
    """Maximum disk space of all pulled models, such as `200GiB`. A pull that would exceed it is refused before it
    begins. Default: the free disk space less 256 MiB."""
    allow_http: bool = False
    """Whether pulls may use plain HTTP to other machines."""
    share: bool = True
    """Whether other runners of the mesh may copy the pulled models of this machine instead of downloading them."""
    share_rate: Annotated[SizeText, PUBLIC] | None = None
    """Maximum bytes per second that this machine sends other runners, such as `20MiB`. Default: no limit."""

    @property
    def share_rate_bytes(self) -> int | None:
        """The maximum in bytes per second; None: no limit."""
        return None if self.share_rate is None else parse_size(self.share_rate, "model_store.share_rate")

    @property
    def disk_limit_bytes(self) -> int | None:
        """The limit in bytes; None: no limit but the disk."""
        return None if self.disk_limit is None else parse_size(self.disk_limit, "model_store.disk_limit")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """An agent that the runner publishes with its models."""

    name: Annotated[Name, PUBLIC]
    """Name of the agent, unique in the mesh; requests use `agent/<name>`."""
    model: Annotated[ModelName | None, PUBLIC] = None
    """Model that answers. Set either this or `pool`."""
    pool: Annotated[ModelName | None, PUBLIC] = None
    """Pool that answers. Set either this or `model`."""
    description: Annotated[str, MaxLen(1024), PLAIN, PUBLIC] = ""
    """Description for people."""
    tier: Annotated[Tier, PUBLIC] | None = None
    """Tier of the agent, as of a model."""
    labels: Annotated[Mapping[LabelKey, LabelValue], MaxLen(MAX_LABELS), PUBLIC] = field(default_factory=dict)
    """Labels by which commands select the agent."""
    owner: Annotated[Owner, PUBLIC] | None = None
    """Person or team responsible for the agent."""
    system_prompt: Annotated[str, MaxLen(65_536), PLAIN, PUBLIC] = ""
    """System prompt that is put before the conversation."""
    default_params: Annotated[Mapping[str, Any], MaxLen(64), PLAIN, PUBLIC] = field(default_factory=dict)
    """Default parameters of requests, such as `temperature: 0.2`."""
    forced_params: Annotated[Mapping[str, Any], MaxLen(64), PLAIN, PUBLIC] = field(default_factory=dict)
    """Parameters that replace those of requests."""
    removed_params: Annotated[tuple[Name, ...], MaxLen(16), PUBLIC] = ()
    """Parameters of requests that are removed, by name."""
    platform_prompt: bool = False
    """Whether the conversation begins with the platform prompt: the mesh, date and time, tool budget, and how to raise
    signals."""
    tools: Annotated[tuple[Name, ...], MaxLen(64), TOOL, PUBLIC] = ()
    """Tools that the runner runs for the model. The runner that answers must have them in its `tools`."""
    max_tool_iterations: Annotated[int, Ge(0), Le(64)] | None = None
    """Maximum number of further turns of the model with tool results. Default: the runner's."""
    signals: Annotated[tuple[Annotated[str, MaxLen(64), PLAIN], ...], MaxLen(64)] = ()
    """Control signals that the model may raise, such as `NEEDS_HIGHER_REASONER`."""
    stop_on_decision_request: bool = True
    """Whether a signal that asks for a decision ends the answer."""
    repetition: Repetition | None = None
    """What happens if an answer repeats itself: `off`, `warn` or `kill`. Default: the model's."""
    parse_text_tool_calls: bool = True
    """Whether tool calls that the model writes as plain text are recognized."""

    def __post_init__(self) -> None:
        if (self.model is None) == (self.pool is None):
            raise ValueError("an agent needs either model or pool")


def _name_of_installed(name: str) -> str:
    try:
        return require_runtime(name).name
    except FieldError as refused:
        raise ValueError(refused.message.removeprefix(f"{refused.field}: ")) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSettings:
    """One runner process."""

    name: Annotated[Name, PUBLIC]
    """Name of the runner, unique in the mesh."""
    runtime: Annotated[str, Checked(_name_of_installed), PLAIN, PUBLIC] = DEFAULT_RUNTIME
    """Kind of engine, such as `llama_server`, `vllm`, `openai_http` (a server that is already running) or
    `openai_remote` (a remote provider). `weft doctor` lists all of them; see docs/engines.md."""
    command: Annotated[tuple[str, ...] | None, PROGRAM, PUBLIC] = None
    """Server program and its first arguments. Default: `llama-server` on PATH, else the xllamacpp launcher. For
    llama_cpp_python and ctranslate2: a Python interpreter that has the library, the path of weft's
    `weft_extensions/engines/engine_host/bootstrap.py`, and the module `weft_extensions.engines.llama_cpp_python.server`
    or `weft_extensions.engines.ctranslate2.server`. Default for ctranslate2: the environment that `weft runtime install
    ctranslate2` installed."""
    url: Annotated[UrlText, PUBLIC, SECRET] | None = field(default=None, repr=False)
    """Base URL of a running server, such as `http://127.0.0.1:11434`. Without `models`, all models that the server
    lists are served, and changes of its list are followed. It is also the default `url` of the runner's models."""
    api_key_env: Annotated[str, MaxLen(128), VARIABLE, PUBLIC] | None = None
    """With `url`: environment variable that contains the server's API key."""
    key_variables: Annotated[tuple[Annotated[str, MaxLen(128), VARIABLE], ...], MaxLen(64), PUBLIC] = ()
    """Environment variables that `api_key_env` of an attached server may name, besides those that begin with
    `WEFT_KEY_`. Settings of this file may name any."""
    remote: bool | None = None
    """With `url` and without `models`: whether requests for the server's models are sent to a remote provider. Required
    if the address is outside your own networks."""
    max_listed_models: Annotated[int, Ge(1), Le(1024), PUBLIC] = DEFAULT_MAX_LISTED_MODELS
    """With `url` and without `models`: maximum number of models to serve, in the order of the server's list."""
    models: Annotated[tuple[ModelSettings, ...], PUBLIC]
    """Its models, one process each, by the settings class of its runtime."""
    agents: Annotated[tuple[AgentSettings, ...], MaxLen(256), PUBLIC] = ()
    """Agents that the runner publishes with its models."""
    labels: Annotated[Mapping[LabelKey, LabelValue], MaxLen(MAX_LABELS), PUBLIC] = field(default_factory=dict)
    """Labels by which conditions of routes choose runners, such as `zone: office`."""
    max_requests: Annotated[int, Ge(1), Le(65_536)] | None = None
    """Maximum number of concurrent requests over all models of the runner. Default: the sum of its slots."""
    devices: Annotated[tuple[Annotated[int, Ge(0), Le(63)], ...], MaxLen(64), PUBLIC] = ()
    """Accelerators of the host that the runner may use, by number in PCI bus order. Default: those in
    CUDA_VISIBLE_DEVICES, else all."""
    worker_hosts: Annotated[tuple[Annotated[str, Pattern(r"^[!-~]{1,255}$"), PLAIN], ...], MaxLen(256), PUBLIC] = ()
    """Other hosts that hold a part of the models, if an engine runs on several hosts: their names as `hostname` prints
    them. Accelerator memory of all these hosts is scheduled together. See docs/models.md."""
    port_range: Annotated[str, Pattern(r"^\d{1,5}-\d{1,5}$"), PLAIN] | None = None
    """Range of ports for engines to listen on, such as `41000-41099`. Default: any free port."""
    http_port: Annotated[Port | None, PUBLIC] = None
    """Loopback port of the runner's own HTTP API (see docs/api.md); 0 picks a free one. Default: no HTTP API."""
    memory_wait_seconds: Seconds = 300.0
    """Longest time that a load waits for accelerator memory."""
    stored_prompts_mb: Annotated[int, Ge(0), Le(1_048_576)] = 2048
    """Disk space in the home, in MiB, for encrypted prompts of models that are unloaded, so that conversations continue
    without their prompts being processed again, also after a restart; 0: none are stored."""
    probe_interval_seconds: Seconds = 5.0
    """For `openai_http`: how often the server is probed."""
    probe_failures: Annotated[int, Ge(1), Le(1000)] = 3
    """For `openai_http`: number of consecutive failed probes after which the server counts as unavailable."""
    load_stall_seconds: Seconds = 300.0
    """Time without output and without CPU time after which a load fails."""
    connect_timeout_seconds: Seconds = _TIMEOUTS.connect_seconds
    """Longest wait for a connection to the engine."""
    headers_timeout_seconds: Seconds | None = _TIMEOUTS.headers_seconds
    """Longest wait for response headers. Default: off, as llama-server sends them with the first token."""
    first_token_timeout_seconds: Seconds | None = _TIMEOUTS.first_token_seconds
    """Longest wait for the first token, even if the engine makes progress. Default: off, as long prompts take time."""
    prefill_liveness_timeout_seconds: Seconds | None = _TIMEOUTS.prefill_liveness_seconds
    """Longest time without progress before the first token. Progress is prefill progress, or CPU or GPU time of the
    engine."""
    idle_stream_timeout_seconds: Seconds = _TIMEOUTS.idle_stream_seconds
    """Longest time between two tokens of an answer."""
    absolute_timeout_seconds: Seconds | None = _TIMEOUTS.absolute_seconds
    """Longest duration of a request, tool calls included. Default: off."""
    first_term_seconds: Seconds = _GRACES.first_term_seconds
    """Time after the first SIGTERM to an engine until a second one is sent; SIGKILL follows 2 s later."""
    max_deaths: Annotated[int, Ge(1), Le(1000)] = _RESTART.max_deaths
    """Number of crashes within 30 s that counts as a crash loop."""
    first_pause_seconds: Seconds = _RESTART.first_pause_seconds
    """Pause after a crash loop; doubles with each further one, up to 5 minutes."""
    tools: Annotated[tuple[ToolSettings, ...], MaxLen(64), PUBLIC] = ()
    """Tools that models and agents can list in their `tools`."""
    signals: Annotated[tuple[SignalSettings, ...], MaxLen(32)] = ()
    """Custom control signals, in addition to the built-in ones."""
    max_tool_iterations: Annotated[int, Ge(0), Le(64)] = _CHAT.max_tool_iterations
    """Maximum number of further turns of a model with tool results. An agent's own setting overrides it."""
    time_zone: Annotated[str, MaxLen(64), PLAIN] | None = None
    """Time zone of the date and time in the platform prompt, such as `Europe/Berlin`. Default: the machine's."""
    platform_prompt: bool = _CHAT.platform_prompt
    """Whether every chat with the runner's models begins with the platform prompt. A model's own setting overrides it.
    It is not used for translation models and models that do not chat."""
    platform_context: Annotated[str, MaxLen(8192), PLAIN] = _CHAT.platform_context
    """Text about your mesh in the platform prompt, for the model to read."""

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
