"""The sections of the configuration file about runners: their agents, tools and signals. Models: `model_settings`."""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, field_validator, model_validator

from runner_svc.runtimes.runtime import Runtime
from runner_svc.runtimes.settings import ModelSettings, SleepingModelSettings, StartedModelSettings
from runner_svc.runtimes.table import DEFAULT_RUNTIME, require_runtime
from weft.kernel.errors import FieldError, invalid_field
from weft.kernel.names import require_name
from weft_app.config.model_settings import AnyModel, read_models
from weft_app.config.section import Name, Port, Repetition, Seconds, Section


class AgentSection(Section):
    """An agent that the runner publishes with its models."""

    name: Name
    """Unique in the mesh; callers ask for model `agent/<name>`."""
    model: Name | None = None
    """Who answers: this model, or ..."""
    pool: Name | None = None
    """... this pool."""
    description: Annotated[str, Field(max_length=1024)] = ""
    """For people."""
    system_prompt: Annotated[str, Field(max_length=65_536)] = ""
    """Put before the conversation."""
    default_params: dict[str, Any] = Field(default={}, max_length=64)
    """Used where a request leaves a parameter out, such as `temperature: 0.2`."""
    platform_prompt: bool = False
    """Begin the conversation with the platform's own prompt: the mesh, date and time, tool budget, how to signal."""
    tools: tuple[Name, ...] = Field(default=(), max_length=64, strict=False)
    """Tools that the mesh runs for the model; the runner that answers must have them in its `tools`."""
    max_tool_iterations: Annotated[int, Field(ge=0, le=64)] | None = None
    """How often the model may be asked again with results of tools. Default: the runner's."""
    signals: tuple[Annotated[str, Field(max_length=64)], ...] = Field(default=(), max_length=64, strict=False)
    """Control signals that the model may raise, such as `NEEDS_HIGHER_REASONER`."""
    stop_on_decision_request: bool = True
    """Whether a signal that asks for a decision ends the answer."""
    repetition: Repetition | None = None
    """What happens to an answer that repeats itself. Default: the model's."""
    parse_text_tool_calls: bool = True
    """Whether calls that the model writes as text count as calls."""

    @model_validator(mode="after")
    def _has_one_target(self) -> "AgentSection":
        if (self.model is None) == (self.pool is None):
            raise ValueError("an agent needs either model or pool")
        return self


class ToolSection(Section):
    """A source of tools that the runner runs for models. `type` says which of the other names apply."""

    type: Literal["python", "mcp_command", "mcp_http"]
    """A Python function, an MCP server that the runner starts, or one that runs already."""
    name: Name
    """For python: the tool's name. For MCP: a prefix, so that `files` and its tool `read` give `files.read`."""
    function: Annotated[str, Field(max_length=512)] | None = None
    """For python: `package.module:function`. Its annotations give the schema, its docstring the description."""
    argv: tuple[str, ...] = Field(default=(), strict=False, max_length=64, repr=False)
    """For mcp_command: the program and its arguments; there is no shell."""
    environment: dict[str, str] = Field(default={}, max_length=64, repr=False)
    """For mcp_command: set for the program, beside PATH, HOME and LANG and nothing else of the runner's own.
    `${WEFT_TOOL_...}` stands for that environment variable of the runner."""
    url: Annotated[str, Field(max_length=2048)] | None = Field(default=None, repr=False)
    """For mcp_http: where the server listens (streamable HTTP)."""
    headers: dict[str, str] = Field(default={}, max_length=32, repr=False)
    """For mcp_http. `${WEFT_TOOL_...}` stands for that environment variable of the runner."""
    allow: tuple[str, ...] = Field(default=(), strict=False, max_length=256)
    """For MCP: the server's tools that may be used. Default: all of them."""
    remote: bool = False
    """Whether calling it sends bytes off the premises; then only requests with `allow_remote` get it."""
    timeout_seconds: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """Longest time that one call may take; the model is told when it is over."""
    max_output_bytes: Annotated[int, Field(ge=256, le=16_777_216)] = 65_536
    """How much of a tool's output the model is told; the rest is cut, and said."""

    @model_validator(mode="after")
    def _fits_its_type(self) -> "ToolSection":
        needed = {"python": "function", "mcp_command": "argv", "mcp_http": "url"}[self.type]
        if not getattr(self, needed):
            raise ValueError(f"a tool of type {self.type} needs {needed}")
        return self


class SignalSection(Section):
    """A control signal of your own, beside the built-in ones."""

    name: Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]{0,63}$")]
    """In capitals, such as `NEEDS_LEGAL_REVIEW`."""
    description: Annotated[str, Field(min_length=1, max_length=1024)]
    """When to raise it, for the model to read."""
    parameters: dict[str, Any] = Field(default={}, max_length=16)
    """JSON schema of its arguments. Default: a `reason`."""
    asks_for_decision: bool = False
    """Whether it ends the answer where the agent says `stop_on_decision_request`."""


class RunnerSection(Section):
    """One runner process."""

    name: Name
    """Unique in the mesh."""
    runtime: str = DEFAULT_RUNTIME
    """The kind of engine: llama.cpp's server or llama-cpp-python, which weft starts, an OpenAI-compatible server that
    runs already, the models of a provider off the premises, or one that another package adds, see docs/runtimes.md;
    `weft doctor` lists them."""
    command: tuple[str, ...] | None = Field(default=None, strict=False)
    """The server program and its first arguments. Default: `llama-server` on PATH, else the xllamacpp launcher. For
    llama_cpp_python: another interpreter that has weft and the library, with `-m
    runner_svc.runtimes.llama_cpp_python.host`."""
    models: Annotated[tuple[AnyModel, ...], PlainValidator(read_models)]
    """What it serves, one process each; what a model may have depends on the runtime."""
    agents: tuple[AgentSection, ...] = Field(default=(), max_length=256, strict=False)
    """Agents it publishes with its models."""
    max_requests: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Requests it works on at once over all its models. Default: as many as its slots."""
    devices: tuple[Annotated[int, Field(ge=0, le=63)], ...] = Field(default=(), max_length=64, strict=False)
    """Accelerators of the host that it may use, by number in the order of the PCI bus. Default: those that
    CUDA_VISIBLE_DEVICES names, or all."""
    port_range: Annotated[str, Field(pattern=r"^\d{1,5}-\d{1,5}$")] | None = None
    """Ports that engines listen on, such as `41000-41099`, where others are closed. Default: any free one."""
    http_port: Port | None = None
    """Loopback port of this runner's own HTTP API, see docs/runner-api.md; 0 takes a free one. Default: it has none."""
    memory_wait_seconds: Seconds = 300.0
    """Longest wait of a load for accelerator memory."""
    probe_interval_seconds: Seconds = 5.0
    """For openai_http: how often the server is asked whether it is there."""
    probe_failures: Annotated[int, Field(ge=1, le=1000)] = 3
    """For openai_http: probes in a row that must fail before the server counts as gone."""
    load_stall_seconds: Seconds = 300.0
    """Loading is given up when neither output nor CPU time moved for this long."""
    connect_timeout_seconds: Seconds = 5.0
    """Longest wait for a connection to the engine."""
    headers_timeout_seconds: Seconds | None = None
    """Longest wait for response headers. Off: llama-server sends them with the first token."""
    first_token_timeout_seconds: Seconds | None = None
    """Longest wait for the first token, however busy the engine is. Off: a long prompt takes its time."""
    prefill_liveness_timeout_seconds: Seconds | None = 120.0
    """Longest time without a sign of life before the first token: prefill progress, CPU or GPU time of the engine."""
    idle_stream_timeout_seconds: Seconds = 120.0
    """Longest time without a token once the answer has begun."""
    absolute_timeout_seconds: Seconds | None = None
    """Longest time for a whole request, tools included. Off."""
    liveness_probe_interval_seconds: Seconds = 1.0
    """How often signs of life are looked for."""
    first_term_seconds: Seconds = 3.0
    """Grace after the first SIGTERM."""
    second_term_seconds: Seconds = 2.0
    """Grace after the second SIGTERM, before SIGKILL."""
    kill_seconds: Seconds = 5.0
    """Longest wait for the kernel after SIGKILL."""
    max_deaths: Annotated[int, Field(ge=1, le=1000)] = 5
    """A crash loop is this many deaths ..."""
    death_window_seconds: Seconds = 30.0
    """... within this time."""
    first_pause_seconds: Seconds = 10.0
    """Pause after a crash loop; doubles with every further one."""
    max_pause_seconds: Seconds = 300.0
    """Longest such pause."""
    tools: tuple[ToolSection, ...] = Field(default=(), max_length=64, strict=False)
    """Tools that the runner can run for models and agents that list them."""
    signals: tuple[SignalSection, ...] = Field(default=(), max_length=32, strict=False)
    """Control signals beside the built-in ones."""
    max_tool_iterations: Annotated[int, Field(ge=0, le=64)] = 8
    """How often a model may be asked again with results of tools, where its agent says nothing."""
    max_tool_calls_per_turn: Annotated[int, Field(ge=1, le=64)] = 16
    """Tool calls that one turn of a model may hold."""
    time_zone: Annotated[str, Field(max_length=64)] | None = None
    """Zone of the date and time in the platform prompt, such as `Europe/Berlin`. Default: the machine's."""
    platform_context: Annotated[str, Field(max_length=8192)] = ""
    """What the platform prompt says about your mesh, for the model to read."""

    @property
    def engine(self) -> Runtime[Any]:
        """The descriptor of its runtime."""
        return require_runtime(self.runtime)

    @field_validator("runtime")
    @classmethod
    def _is_installed(cls, name: str) -> str:
        try:
            require_runtime(name)
        except FieldError as refused:
            raise ValueError(refused.message.removeprefix(f"{refused.field}: ")) from None
        return name

    @model_validator(mode="after")
    def _can_unload(self) -> "RunnerSection":
        for model in self.models:
            sleep = model.sleep if isinstance(model, SleepingModelSettings) else None
            if sleep is not None and sleep.type == "unload" and not self.engine.starts_engines:
                raise ValueError(f"model {model.name} cannot be unloaded: weft did not start its server")
        return self


def published_models(runner: RunnerSection) -> list[ModelSettings]:
    """The models of a runner that the mesh hears of where publishing is the default."""
    return [model for model in runner.models if model.publish is not False]


def with_replicas(section: RunnerSection, models: tuple[ModelSettings, ...]) -> tuple[ModelSettings, ...]:
    """`models` of a runner, each followed by its replicas: "qwen", "qwen-2", "qwen-3".

    Those beyond `replicas` start asleep. Raises INVALID_ARGUMENT naming the field.
    """
    taken = {model.name for model in section.models} | {agent.name for agent in section.agents}
    expanded: list[ModelSettings] = []
    for model in models:
        replicas = _replicas(section, model)
        for replica in replicas[1:]:
            if replica.name in taken:
                raise invalid_field(
                    f"runners.{section.name}.models.{model.name}.replicas",
                    f"the replica {replica.name} would have the name of another model or agent; rename that one",
                )
            taken.add(replica.name)
        expanded += replicas
    return tuple(expanded)


def replica_names(model: ModelSettings) -> tuple[str, ...]:
    """What a model and its replicas are called: "qwen", "qwen-2", "qwen-3"."""
    return model.name, *(f"{model.name}-{number}" for number in range(2, _count(model) + 1))


def _count(model: ModelSettings) -> int:
    if not isinstance(model, StartedModelSettings):
        return 1
    return model.replicas if model.replica_max is None else model.replica_max


def _replicas(section: RunnerSection, model: ModelSettings) -> list[ModelSettings]:
    where = f"runners.{section.name}.models.{model.name}"
    count = _count(model)
    if not isinstance(model, StartedModelSettings):
        return [model]
    if count < model.replicas:
        raise invalid_field(f"{where}.replica_max", f"must be at least {model.replicas}, which is `replicas`")
    if count == 1:
        return [model]
    return [
        replace(
            model,
            replicas=1,
            replica_max=None,
            pool=model.pool or model.name,
            name=require_name(name, f"{where}.replicas"),
            start_asleep=model.start_asleep or number > model.replicas,
        )
        for number, name in enumerate(replica_names(model), 1)
    ]
