"""The configuration file: `weft.yaml`, with `weft.local.yaml` beside it merged over it.

Every limit has a name with its unit. Unknown names are refused: a typo must not silently mean the default.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from weft.kernel.errors import FieldError, invalid_field
from weft.kernel.names import is_name
from weft.kernel.reasons import Reason

CONFIG_NAME = "weft.yaml"
LOCAL_SUFFIX = ".local"
DEFAULT_PORT = 8080


def _name(text: str) -> str:
    if not is_name(text):
        raise ValueError("must be letters, digits, '.', '_', ':' or '-', starting with a letter or digit")
    return text


Name = Annotated[str, AfterValidator(_name)]
Seconds = Annotated[float, Field(gt=0, le=86_400 * 365)]
Port = Annotated[int, Field(ge=0, le=65_535)]


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class WakeSection(_Section):
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


class SleepSection(_Section):
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


class AgentSection(_Section):
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
    default_params: dict[str, Any] = {}
    """Used where a request leaves a parameter out, such as `temperature: 0.2`."""

    @model_validator(mode="after")
    def _has_one_target(self) -> "AgentSection":
        if (self.model is None) == (self.pool is None):
            raise ValueError("an agent needs either model or pool")
        return self


class ModelSection(_Section):
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


class RunnerSection(_Section):
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


class GatewaySection(_Section):
    """The HTTP edge."""

    max_body_bytes: Annotated[int, Field(ge=1024, le=1_073_741_824)] = 10 * 1024 * 1024
    """Largest request body."""
    request_timeout_seconds: Seconds = 600.0
    """Deadline of every request, and the most a caller may ask for."""
    sse_keepalive_seconds: Seconds = 10.0
    """A stream silent for this long gets a comment."""
    headers_within_seconds: Seconds = 1.0
    """How long the status line of a stream is held back, so that a refusal is still a status."""
    write_timeout_seconds: Seconds = 30.0
    """How long a write may wait for a slow reader before its request is cancelled."""
    router_outage_limit_seconds: Seconds = 30.0
    """How long a waiting request puts up with having no router."""
    registry_timeout_seconds: Seconds = 10.0
    """How long one question of `/api/v1` to the registry may take."""
    max_event_watches: Annotated[int, Field(ge=1, le=10_000)] = 64
    """Streams of `/api/v1/events` at once."""


class RouterSection(_Section):
    """The scheduler."""

    queue_depth_per_runner: Annotated[int, Field(ge=0, le=1_000_000)] = 16
    """Requests that may wait for a pool, per runner in it."""
    queue_timeout_seconds: Seconds = 30.0
    """Longest wait for a slot."""
    max_attempts: Annotated[int, Field(ge=1, le=10)] = 3
    """Attempts on runners that took the request and failed before any content."""
    ticket_lifetime_seconds: Seconds = 30.0
    """How long a permit to start work is good."""
    wake_settle_seconds: Seconds = 10.0
    """Longest time from the end of a wake until the model is reported ready."""
    wake_recipes: tuple[Literal["wake_on_lan", "http", "command"], ...] = Field(
        default=("wake_on_lan", "http"), strict=False
    )
    """Kinds of recipes that the router runs for models with `by: mesh`. A command is a program on the router's host."""


class RelaySection(_Section):
    """Where dial-out runners join. It is part of the router."""

    listen: str | None = None
    """Address and port, such as `0.0.0.0:7443`. Default: off. Anything but loopback uses TLS."""
    certificate_file: Annotated[Path, Field(strict=False)] | None = None
    """PEM chain. Default off loopback: a self-signed one under the home, which runners pin by its fingerprint."""
    key_file: Annotated[Path, Field(strict=False)] | None = None
    """PEM key of the certificate."""
    max_links: Annotated[int, Field(ge=1, le=100_000)] = 1000
    """Links that may stand at once."""
    max_calls_per_link: Annotated[int, Field(ge=1, le=65_536)] = 1024
    """Calls that may run at once on one link."""
    open_timeout_seconds: Seconds = 10.0
    """Longest time from the first byte of a link until its runner has opened a session."""


class RegistrySection(_Section):
    """Who is alive."""

    database_url: str | None = None
    """Default: an SQLite file under the home. Or `postgresql+asyncpg://user:password@host/database` (TLS:
    `?ssl=require`; a socket: `?host=/folder`), which needs `pip install 'weft[postgres]'` and no transaction-pooling
    proxy between."""
    heartbeat_interval_seconds: Seconds = 30.0
    """How often runners give a sign of life."""
    report_interval_seconds: Seconds = 5.0
    """How often runners report capability."""
    inactive_after_seconds: Seconds = 90.0
    """Silence that makes a runner inactive."""
    delete_after_seconds: Seconds = 14_400.0
    """Inactivity after which a runner is forgotten."""
    restart_grace_seconds: Seconds = 90.0
    """After a start of the registry nobody expires for this long."""
    restart_spread_seconds: Annotated[float, Field(ge=0, le=86_400)] = 30.0
    """Expiries that fall due at the end of that grace are spread over this long."""
    hibernating_keep_seconds: Seconds = 604_800.0
    """A model whose host the mesh can wake is forgotten after its runner was away for this long."""


class AddressSection(_Section):
    """Where services find each other when they run apart, as gRPC targets. `weft up` needs none of it."""

    registry: str | None = None
    """Default: a socket under the home."""
    router: str | None = None
    """Default: a socket under the home."""


class LogSection(_Section):
    """Log files under the home."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least important lines that are written."""
    max_file_bytes: Annotated[int, Field(ge=65_536, le=1_073_741_824)] = 16 * 1024 * 1024
    """A file that grows past this is moved to `<name>.1` and begun anew."""


class WeftConfig(_Section):
    """The whole file."""

    host: str = "127.0.0.1"
    """Where the HTTP surface listens; loopback only, until keys and TLS exist."""
    port: Port = DEFAULT_PORT
    """HTTP port; 0 takes a free one."""
    grpc_port: Port | None = None
    """A loopback TCP port for gRPC besides the Unix socket."""
    drain_seconds: Annotated[float, Field(ge=0, le=3600)] = 10.0
    """How long a stop waits for running requests."""
    runners: tuple[RunnerSection, ...] | None = Field(default=None, max_length=64, strict=False)
    """Default: one runner with the demo model."""
    gateway: GatewaySection = GatewaySection()
    """The HTTP edge."""
    router: RouterSection = RouterSection()
    """The scheduler."""
    relay: RelaySection = RelaySection()
    """Where dial-out runners join."""
    registry: RegistrySection = RegistrySection()
    """Who is alive."""
    addresses: AddressSection = AddressSection()
    """Where services find each other when they run apart."""
    log: LogSection = LogSection()
    """Log files under the home."""

    @model_validator(mode="after")
    def _names_are_unique(self) -> "WeftConfig":
        runners = self.runners or ()
        names = [runner.name for runner in runners]
        names += [model.name for runner in runners for model in runner.models]
        names += [agent.name for runner in runners for agent in runner.agents]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(
                f"names must be unique over runners, models and agents: {', '.join(sorted(twice))} "
                "(replicas have names of their own and share a pool)"
            )
        return self


def published_models(runner: RunnerSection) -> list[ModelSection]:
    """The models of a runner that the mesh hears of where publishing is the default."""
    return [model for model in runner.models if model.publish is not False]


def load_config(path: Path | None, overrides: dict[str, Any] | None = None) -> WeftConfig:
    """The configuration from `path` (default: ./weft.yaml where there is one), its local twin, and the command line.

    Later ones win; mappings are merged, lists replaced. Raises INVALID_ARGUMENT naming file and field.
    """
    if path is None and Path(CONFIG_NAME).is_file():
        path = Path(CONFIG_NAME)
    merged: dict[str, Any] = {}
    if path is not None:
        local = path.with_name(f"{path.stem}{LOCAL_SUFFIX}{path.suffix}")
        merged = merge(_read(path), _read(local) if local.is_file() else {})
    merged = merge(merged, overrides or {})
    try:
        return WeftConfig.model_validate(merged)
    except ValidationError as error:
        raise _field_error(error, path) from error


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` laid over `base`: mappings are merged key by key, anything else is replaced."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result


def _read(path: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise invalid_field("--config", f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        line = f" (line {where.line + 1})" if where is not None else ""
        raise FieldError("--config", f"{path} is not YAML{line}", Reason.MALFORMED_REQUEST) from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise invalid_field("--config", f"{path} must be a mapping of names to values")
    return document


def _field_error(error: ValidationError, path: Path | None) -> FieldError:
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or "configuration"
    where = f" (in {path})" if path is not None else ""
    return invalid_field(field, f"{first['msg']}{where}")
