"""The configuration file: `weft.yaml`, with `weft.local.yaml` beside it merged over it.

Every limit has a name with its unit. Unknown names are refused: a typo must not silently mean the default.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from weft.kernel.errors import FieldError, invalid_field
from weft.kernel.reasons import Reason
from weft_app.config.auth_section import AuthSection
from weft_app.config.caller_sections import ClientName, ClientSection, RouterRatesSection, TenantName, TenantSection
from weft_app.config.config_section import Name, Port, RateText, Seconds, Section
from weft_app.config.gateway_sections import ConnectionsSection, LimitsSection
from weft_app.config.media_section import MediaSection
from weft_app.config.registry_sections import GovernanceSection, KeysSection, LedgerSection, OperationsSection
from weft_app.config.replicas import replica_names
from weft_app.config.response_section import ResponsesSection
from weft_app.config.router_sections import PoolSection, SchedulingSection
from weft_app.config.runner_sections import RunnerSection
from weft_app.config.task_section import BatchEdgeSection, BatchesSection, TasksSection
from weft_app.config.tls_section import EdgeTlsSection, TlsSection

CONFIG_NAME = "weft.yaml"
LOCAL_SUFFIX = ".local"
_NAME = "name"
DEFAULT_PORT = 8080


class RateLimitsSection(Section):
    """How many requests a tenant may make, in any second, minute or hour."""

    default: RateText = "50req/min"
    """For tenants that are not named, such as `100req/min`, `5req/sec` or `1000req/hour`."""
    tenants: dict[str, RateText] = Field(default={}, max_length=1000)
    """By tenant, as in X-Tenant-ID."""


class GatewaySection(Section):
    """The HTTP edge."""

    max_body_bytes: Annotated[int, Field(ge=1024, le=1_073_741_824)] = 10 * 1024 * 1024
    """Largest request body, uploads of audio and images aside."""
    body_timeout_seconds: Seconds = 60.0
    """From the end of a request's headers to the end of its body."""
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
    max_running_responses: Annotated[int, Field(ge=1, le=100_000)] = 2048
    """Streams of `/v1/responses` at once, to be found by their ids meanwhile."""
    keep_responses: Literal["by_default", "on_request", "never"] = "by_default"
    """Which responses of `/v1/responses` are kept with their input: all unless a request says `"store": false`, those
    whose request says `"store": true`, or none. What has been kept before stays until it is deleted or its time is
    over (`router.responses.keep_seconds`)."""
    response_store_timeout_seconds: Seconds = 5.0
    """How long whoever keeps responses may take to answer."""
    task_timeout_seconds: Seconds = 30.0
    """How long whoever runs durable tasks may take to answer; to be done, a task may take hours."""
    batches: BatchEdgeSection = BatchEdgeSection()
    """Files and batches."""
    allowed_hosts: tuple[Annotated[str, Field(min_length=1, max_length=253)], ...] = Field(
        default=(), max_length=1000, strict=False
    )
    """Names and addresses, without port, by which callers may reach it, besides `host` and those of loopback: what a
    Host or Origin header may say. A page elsewhere that points its own name here says its own name."""
    tls: EdgeTlsSection = EdgeTlsSection()
    """HTTPS."""
    tls_terminated_elsewhere: bool = False
    """Whether a proxy in front speaks TLS with the callers, so that `host` may be any address without `tls`. What is
    between that proxy and the gateway is plain: keep it where nobody listens."""
    rate_limits: RateLimitsSection | None = None
    """Requests per tenant. Default: as many as they like."""
    limits: LimitsSection = LimitsSection()
    """What one request may hold."""
    connections: ConnectionsSection = ConnectionsSection()
    """What one connection may do."""
    media: MediaSection = MediaSection()
    """Images and recordings in requests."""


class RouterSection(Section):
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
    max_cold_wait_seconds: Seconds = 20.0
    """How long requests wait for a model that is not loaded until models in use give way for it."""
    min_turn_seconds: Seconds = 2.0
    """How long a model that was loaded and is wanted stays loaded at least ..."""
    swap_quantum_ratio: Annotated[float, Field(ge=0, le=1_000)] = 2.0
    """... and for how many times as long as its load took, but no longer than `max_cold_wait_seconds`."""
    scheduling: SchedulingSection = SchedulingSection()
    """Finer settings."""
    wake_recipes: tuple[Literal["wake_on_lan", "http", "command"], ...] = Field(
        default=("wake_on_lan", "http"), strict=False
    )
    """Kinds of recipes that the router runs for models with `by: mesh`. A command is a program on the router's host."""
    default_pool: PoolSection = PoolSection()
    """Pools that are not named in `pools`."""
    pools: dict[Name, PoolSection] = Field(default={}, max_length=10_000)
    """By pool, or by model for a model without one."""
    default_tenant: TenantSection = TenantSection()
    """Tenants that are not named in `tenants`."""
    tenants: dict[TenantName, TenantSection] = Field(default={}, max_length=10_000)
    """By tenant, as in X-Tenant-ID."""
    clients: dict[ClientName, ClientSection] = Field(default={}, max_length=1_024)
    """Profiles, by client."""
    multi_tenant: bool = False
    """Whether tenants are limited to 50req/min where `rate_limits` says nothing else."""
    database_url: str | None = Field(default=None, repr=False)
    """What outlives the router. Default: an SQLite file under the home. PostgreSQL: see `registry.database_url`."""
    responses: ResponsesSection = ResponsesSection()
    """Answers that are kept for callers who come back."""
    tasks: TasksSection = TasksSection()
    """Durable tasks."""
    batches: BatchesSection = BatchesSection()
    """Files and batches."""
    rate_limits: RouterRatesSection | None = None
    """How much tenants may ask for. Default: what TENANT_RATE_LIMIT_<tenant> and DEFAULT_RATE_LIMIT say where
    ENABLE_MULTI_TENANT=true, else as `multi_tenant` says."""


class RelaySection(Section):
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


class RegistrySection(Section):
    """Who is alive."""

    database_url: str | None = Field(default=None, repr=False)
    """Default: an SQLite file under the home. Or `postgresql+asyncpg://user:password@host/database` (TLS:
    `?ssl=require`; a socket: `?host=/folder`), which needs `pip install 'weft[postgres]'` and no transaction-pooling
    proxy between."""
    heartbeat_interval_seconds: Seconds = 30.0
    """How often runners give a sign of life."""
    report_interval_seconds: Seconds = 5.0
    """How often runners report capability."""
    max_clock_offset_seconds: Seconds = 300.0
    """A runner whose clock is further from the registry's takes no requests. Not for runners that join over a relay."""
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
    allow_cloud_fallback: bool | None = None
    """Whether routes may fall back to models off the premises, on a new database; later `weft config set` changes it.
    Default: what the environment variable WEFT_ALLOW_CLOUD_FALLBACK says, else true."""
    ledger: LedgerSection = LedgerSection()
    """The book of accelerator memory."""
    operations: OperationsSection = OperationsSection()
    """Loads, unloads and flushes."""
    governance: GovernanceSection = GovernanceSection()
    """Who may have them done."""
    keys: KeysSection = KeysSection()
    """API keys."""


class DeclaredDevice(Section):
    """An accelerator, or a budget of memory, that the driver's library does not know."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    """For people."""
    memory_mb: Annotated[int, Field(ge=1, le=16_777_216)]
    """How much may be booked on it, in MiB; the ledger's margin is taken off."""


class AcceleratorSection(Section):
    """The devices of this host whose memory is booked."""

    nvidia: bool = True
    """Whether NVIDIA's library (NVML) is asked. Without a driver there is nothing to ask, and nothing is booked."""
    declared: tuple[DeclaredDevice, ...] = Field(default=(), max_length=64, strict=False)
    """Devices that it does not know: other makers' cards, or a budget of ordinary memory for models on processors.
    Where any is declared, NVIDIA's library is not asked."""
    poll_interval_seconds: Seconds = 1.0
    """How old what is known of a device may be."""


class AddressSection(Section):
    """Where services find each other when they run apart, as gRPC targets. `weft up` needs none of it."""

    registry: str | None = None
    """Such as `mesh.example:7070`. A Unix socket and loopback are plaintext, everything else is TLS, and so is loopback
    with `tls:` in front. Default: a socket under the home."""
    router: str | None = None
    """Default: a socket under the home."""


class LogSection(Section):
    """Log files under the home."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least important lines that are written."""
    max_file_bytes: Annotated[int, Field(ge=65_536, le=1_073_741_824)] = 16 * 1024 * 1024
    """A file that grows past this is moved to `<name>.1` and begun anew."""


class WeftConfig(Section):
    """The whole file."""

    host: str = "127.0.0.1"
    """Where the HTTP surface listens. Anything but loopback asks for keys, and needs `gateway.tls`."""
    port: Port = DEFAULT_PORT
    """HTTP port; 0 takes a free one."""
    grpc_port: Port | None = None
    """A loopback TCP port for gRPC besides the Unix socket."""
    drain_seconds: Annotated[float, Field(ge=0, le=3600)] = 10.0
    """How long a stop waits for running requests."""
    runners: tuple[RunnerSection, ...] | None = Field(default=None, max_length=64, strict=False)
    """Default: one runner with the demo model."""
    auth: AuthSection = AuthSection()
    """Whether callers need keys."""
    gateway: GatewaySection = GatewaySection()
    """The HTTP edge."""
    router: RouterSection = RouterSection()
    """The scheduler."""
    relay: RelaySection = RelaySection()
    """Where dial-out runners join."""
    registry: RegistrySection = RegistrySection()
    """Who is alive."""
    accelerators: AcceleratorSection = AcceleratorSection()
    """The devices of this host whose memory is booked."""
    addresses: AddressSection = AddressSection()
    """Where services find each other when they run apart."""
    tls: TlsSection = TlsSection()
    """TLS between services."""
    log: LogSection = LogSection()
    """Log files under the home."""

    @model_validator(mode="after")
    def _names_are_unique(self) -> "WeftConfig":
        runners = self.runners or ()
        names = [runner.name for runner in runners]
        names += [name for runner in runners for model in runner.models for name in replica_names(model)]
        names += [agent.name for runner in runners for agent in runner.agents]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(
                f"names must be unique over runners, models and agents: {', '.join(sorted(twice))} "
                "(replicas have names of their own and share a pool)"
            )
        return self


def load_config(path: Path | None, overrides: dict[str, Any] | None = None) -> WeftConfig:
    """The configuration from `path` (default: ./weft.yaml where there is one), its local twin, and the command line.

    Later ones win, as `merge` says. Raises INVALID_ARGUMENT naming file and field.
    """
    merged: dict[str, Any] = {}
    for file in config_files(path):
        merged = merge(merged, _read(file))
        path = path or file
    merged = merge(merged, overrides or {})
    try:
        return WeftConfig.model_validate(merged)
    except ValidationError as error:
        raise _field_error(error, path) from error


def config_files(path: Path | None) -> tuple[Path, ...]:
    """The files that `load_config` reads, later ones over earlier ones; none where there is no ./weft.yaml."""
    if path is None:
        path = Path(CONFIG_NAME)
        if not path.is_file():
            return ()
    local = path.with_name(f"{path.stem}{LOCAL_SUFFIX}{path.suffix}")
    return (path, local) if local.is_file() else (path,)


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` laid over `base`: mappings are merged key by key, lists of named things name by name.

    Anything else is replaced.
    """
    result = dict(base)
    for key, value in over.items():
        result[key] = _merged(result.get(key), value)
    return result


def _merged(below: Any, value: Any) -> Any:
    if isinstance(below, dict) and isinstance(value, dict):
        return merge(below, value)
    if _is_named(below) and _is_named(value):
        laid = {item[_NAME]: item for item in value}
        known = {item[_NAME] for item in below}
        kept = [merge(item, laid.get(item[_NAME], {})) for item in below]
        return [*kept, *(item for item in value if item[_NAME] not in known)]
    return value


def _is_named(value: Any) -> bool:
    """Whether it is a list of things that each have a name of their own, such as runners and models."""
    if not isinstance(value, list) or not value:
        return False
    names = [item.get(_NAME) if isinstance(item, dict) else None for item in value]
    return all(isinstance(name, str) for name in names) and len(set(names)) == len(names)


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
    return invalid_field(field, f"{first['msg'].removeprefix('Value error, ')}{where}")
