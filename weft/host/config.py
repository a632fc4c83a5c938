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


class ModelSection(_Section):
    """One model of a runner."""

    name: Name
    """Unique in the mesh."""
    pool: Name | None = None
    """Models of one pool answer for each other."""
    path: Annotated[Path, Field(strict=False)]
    """The GGUF file; `~` is your home folder."""
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
    runtime: Literal["llama_server"] = "llama_server"
    """The kind of engine."""
    command: tuple[str, ...] | None = Field(default=None, strict=False)
    """The server program and its first arguments. Default: `llama-server` on PATH, else the xllamacpp launcher."""
    models: tuple[ModelSection, ...] = Field(min_length=1, max_length=64, strict=False)
    """What it serves, one process each."""
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


class RegistrySection(_Section):
    """Who is alive."""

    database_url: str | None = None
    """SQLAlchemy URL; default: an SQLite file under the home."""
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
    registry: RegistrySection = RegistrySection()
    """Who is alive."""
    addresses: AddressSection = AddressSection()
    """Where services find each other when they run apart."""
    log: LogSection = LogSection()
    """Log files under the home."""

    @model_validator(mode="after")
    def _names_are_unique(self) -> "WeftConfig":
        runners = self.runners or ()
        for kind, names in (
            ("runner", [runner.name for runner in runners]),
            ("model", [model.name for runner in runners for model in runner.models]),
        ):
            twice = {name for name in names if names.count(name) > 1}
            if twice:
                names_text = ", ".join(sorted(twice))
                raise ValueError(
                    f"{kind} names must be unique: {names_text} (replicas have names of their own and share a pool)"
                )
        return self


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
