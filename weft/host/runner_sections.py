"""The sections of the configuration file about runners: their models, how these sleep and wake, their agents."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from weft.host.config_section import Name, Seconds, Section


class WakeSection(Section):
    """What wakes a sleeping model. `type` says which of the other names apply."""

    type: Literal["http", "command", "wake_on_lan"]
    """An HTTP request, a program, or a magic packet."""
    by: Literal["runner", "mesh"] = "runner"
    """Who does it. A sleeping host cannot wake itself: then it is the mesh, and the recipe is told to it."""
    url: Annotated[str, Field(max_length=2048)] | None = Field(default=None, repr=False)
    """For http: where to. Every 2xx answer is success."""
    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"] = "POST"
    """For http."""
    headers: dict[str, str] = Field(default={}, max_length=32, repr=False)
    """For http. `${WEFT_WAKE_...}` stands for that environment variable of the runner; not with `by: mesh`."""
    argv: tuple[str, ...] = Field(default=(), strict=False, max_length=64, repr=False)
    """For command: the program and its arguments; there is no shell. What it leaves running needs an output of its own:
    its standard error is closed."""
    mac_address: str | None = None
    """For wake_on_lan: hardware address of the sleeping network card."""
    broadcast_address: str = "255.255.255.255"
    """For wake_on_lan: IPv4 address to send to."""
    port: Annotated[int, Field(ge=1, le=65_535)] = 9
    """For wake_on_lan: UDP port."""
    max_wait_seconds: Annotated[float, Field(ge=1, le=3600)] = 60.0
    """Longest wait from the first step until the model takes requests."""

    @model_validator(mode="after")
    def _fits_its_type(self) -> "WakeSection":
        needed = {"http": "url", "command": "argv", "wake_on_lan": "mac_address"}[self.type]
        if not getattr(self, needed):
            raise ValueError(f"a wake recipe of type {self.type} needs {needed}")
        return self


class SleepSection(Section):
    """What puts an idle model to sleep. It is always done by the runner."""

    after_seconds: Seconds
    """Idle time after which the model goes to sleep."""
    type: Literal["unload", "http", "command"] = "unload"
    """End the engine that weft started, send an HTTP request, or run a program."""
    url: Annotated[str, Field(max_length=2048)] | None = Field(default=None, repr=False)
    """For http: where to. Every 2xx answer is success."""
    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"] = "POST"
    """For http."""
    headers: dict[str, str] = Field(default={}, max_length=32, repr=False)
    """For http. `${WEFT_WAKE_...}` stands for that environment variable."""
    argv: tuple[str, ...] = Field(default=(), strict=False, max_length=64, repr=False)
    """For command: the program and its arguments; there is no shell."""
    max_wait_seconds: Annotated[float, Field(ge=1, le=3600)] = 60.0
    """Longest time the action may take."""

    @model_validator(mode="after")
    def _fits_its_type(self) -> "SleepSection":
        needed = {"unload": "after_seconds", "http": "url", "command": "argv"}[self.type]
        if not getattr(self, needed):
            raise ValueError(f"a sleep action of type {self.type} needs {needed}")
        return self


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

    @model_validator(mode="after")
    def _has_one_target(self) -> "AgentSection":
        if (self.model is None) == (self.pool is None):
            raise ValueError("an agent needs either model or pool")
        return self


class ModelSection(Section):
    """One model of a runner."""

    name: Name
    """Unique in the mesh."""
    pool: Name | None = None
    """Models of one pool answer for each other."""
    path: Annotated[Path, Field(strict=False)] | None = None
    """For llama_server: the GGUF file; `~` is your home folder."""
    url: Annotated[str, Field(max_length=2048)] | None = Field(default=None, repr=False)
    """For openai_http: base URL of the server, such as `http://127.0.0.1:11434/v1`. Never told to the mesh."""
    api_key_env: Annotated[str, Field(max_length=128)] | None = None
    """For openai_http: environment variable that holds the server's key. Never told to the mesh."""
    upstream_model: Annotated[str, Field(max_length=512)] | None = None
    """For openai_http: the server's own name of the model. Default: `name`."""
    remote: bool = False
    """Whether serving it sends bytes off the premises."""
    publish: bool | None = None
    """Whether the mesh hears of it. Default: yes in `weft up` and `weft serve`, no in `weft runner join`."""
    wake: WakeSection | None = None
    """What wakes it when it sleeps."""
    sleep: SleepSection | None = None
    """What puts it to sleep when it is idle. Default: it never sleeps by itself."""
    start_asleep: bool = False
    """For llama_server: load it with the first request rather than at the start."""
    slots: Annotated[int, Field(ge=1, le=1024)] = 4
    """Requests it works on at once."""
    context_tokens: Annotated[int, Field(ge=16, le=16_777_216)] = 2048
    """Context of one slot."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Default: cores minus one."""
    embeddings: bool = True
    """Whether it also gives embeddings."""
    extra_arguments: tuple[str, ...] = Field(default=(), strict=False)
    """Further flags for the server program."""


class RunnerSection(Section):
    """One runner process."""

    name: Name
    """Unique in the mesh."""
    runtime: Literal["llama_server", "openai_http"] = "llama_server"
    """The kind of engine: one that weft starts, or an OpenAI-compatible server that runs already."""
    command: tuple[str, ...] | None = Field(default=None, strict=False)
    """The server program and its first arguments. Default: `llama-server` on PATH, else the xllamacpp launcher."""
    models: tuple[ModelSection, ...] = Field(min_length=1, max_length=64, strict=False)
    """What it serves, one process each."""
    agents: tuple[AgentSection, ...] = Field(default=(), max_length=256, strict=False)
    """Agents it publishes with its models."""
    max_requests: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Requests it works on at once over all its models. Default: as many as its slots."""
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
    idle_stream_timeout_seconds: Seconds = 120.0
    """Longest silence between two events once content has begun."""
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

    @model_validator(mode="after")
    def _models_fit_the_runtime(self) -> "RunnerSection":
        needed, foreign = ("path", "url") if self.runtime == "llama_server" else ("url", "path")
        for model in self.models:
            if getattr(model, needed) is None:
                raise ValueError(f"model {model.name} needs {needed}, because the runtime is {self.runtime}")
            if getattr(model, foreign) is not None:
                raise ValueError(f"model {model.name} cannot have {foreign}, because the runtime is {self.runtime}")
            if model.sleep is not None and model.sleep.type == "unload" and self.runtime == "openai_http":
                raise ValueError(f"model {model.name} cannot be unloaded: weft did not start its server")
        return self


def published_models(runner: RunnerSection) -> list[ModelSection]:
    """The models of a runner that the mesh hears of where publishing is the default."""
    return [model for model in runner.models if model.publish is not False]
