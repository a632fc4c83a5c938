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
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ModelSection(_Section):
    """One model of a runner."""

    name: Name
    pool: Name | None = None
    """Models of one pool answer for each other."""
    path: Annotated[Path, Field(strict=False)]
    """The GGUF file; `~` is your home folder."""
    slots: Annotated[int, Field(ge=1, le=1024)] = 4
    context_tokens: Annotated[int, Field(ge=16, le=16_777_216)] = 2048
    """Context of one slot."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Default: cores minus one."""
    embeddings: bool = True
    extra_arguments: tuple[str, ...] = Field(default=(), strict=False)
    """Further flags for the server program."""


class RunnerSection(_Section):
    """One runner process."""

    name: Name
    runtime: Literal["llama_server"] = "llama_server"
    command: tuple[str, ...] | None = Field(default=None, strict=False)
    """The server program and its first arguments. Default: `llama-server` on PATH, else the xllamacpp launcher."""
    models: tuple[ModelSection, ...] = Field(min_length=1, max_length=64, strict=False)
    load_stall_seconds: Seconds = 300.0
    connect_timeout_seconds: Seconds = 5.0
    headers_timeout_seconds: Seconds | None = None
    idle_stream_timeout_seconds: Seconds = 120.0
    first_term_seconds: Seconds = 3.0
    second_term_seconds: Seconds = 2.0
    kill_seconds: Seconds = 5.0
    max_deaths: Annotated[int, Field(ge=1, le=1000)] = 5
    """A crash loop is this many deaths ..."""
    death_window_seconds: Seconds = 30.0
    """... within this time."""
    first_pause_seconds: Seconds = 10.0
    max_pause_seconds: Seconds = 300.0


class GatewaySection(_Section):
    """The HTTP edge."""

    max_body_bytes: Annotated[int, Field(ge=1024, le=1_073_741_824)] = 10 * 1024 * 1024
    request_timeout_seconds: Seconds = 600.0
    sse_keepalive_seconds: Seconds = 10.0
    headers_within_seconds: Seconds = 1.0
    write_timeout_seconds: Seconds = 30.0


class RouterSection(_Section):
    """The scheduler."""

    queue_depth_per_runner: Annotated[int, Field(ge=0, le=1_000_000)] = 16
    queue_timeout_seconds: Seconds = 30.0
    max_attempts: Annotated[int, Field(ge=1, le=10)] = 3
    ticket_lifetime_seconds: Seconds = 30.0


class RegistrySection(_Section):
    """Who is alive."""

    database_url: str | None = None
    """SQLAlchemy URL; default: an SQLite file under the home."""
    heartbeat_interval_seconds: Seconds = 30.0
    report_interval_seconds: Seconds = 5.0
    inactive_after_seconds: Seconds = 90.0
    delete_after_seconds: Seconds = 14_400.0
    restart_grace_seconds: Seconds = 90.0


class AddressSection(_Section):
    """Where services find each other when they run apart, as gRPC targets. `weft up` needs none of it."""

    registry: str | None = None
    router: str | None = None


class LogSection(_Section):
    """Log files under the home."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    max_file_bytes: Annotated[int, Field(ge=65_536, le=1_073_741_824)] = 16 * 1024 * 1024
    """A file that grows past this is moved to `<name>.1` and begun anew."""


class WeftConfig(_Section):
    """The whole file."""

    host: str = "127.0.0.1"
    port: Port = DEFAULT_PORT
    grpc_port: Port | None = None
    """A loopback TCP port for gRPC besides the Unix socket."""
    drain_seconds: Annotated[float, Field(ge=0, le=3600)] = 10.0
    """How long a stop waits for running requests."""
    runners: tuple[RunnerSection, ...] | None = Field(default=None, max_length=64, strict=False)
    """Default: one runner with the demo model."""
    gateway: GatewaySection = GatewaySection()
    router: RouterSection = RouterSection()
    registry: RegistrySection = RegistrySection()
    addresses: AddressSection = AddressSection()
    log: LogSection = LogSection()

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
