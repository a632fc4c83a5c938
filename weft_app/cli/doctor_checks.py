"""Checks of `weft doctor`: the machine, a registry and its standby, providers, and the versions in a mesh.

Neighbouring releases work together: decision 0001. A process with a database that has a newer schema continues until
it is restarted, and is then rejected.
"""

import re
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from grpc_health.v1 import health_pb2_grpc

from weft import __version__
from weft.api.operations.v1 import process_service_pb2 as pb
from weft.client._home import mesh_address
from weft.documents.resource_kinds import ResourceKind
from weft.extension import listener_hooks
from weft.gpu.nvml import Health, NvmlReading
from weft.kernel.channels.failover_channel import CHECK_TIMEOUT_SECONDS, READINESS, Reach, reach_of
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.machine.machine_limits import usable_memory
from weft.kernel.values.address import addresses_of
from weft.kernel.values.names import SECRET_PREFIX
from weft.kernel.values.units import size_words
from weft_app.cli.grpc_calls import MESH, RUNNER_PREFIX, call, health_of
from weft_app.cli.mesh_api import Document, connect
from weft_app.cli.records import ROUTERS
from weft_app.compose.certificate_expiry import WARN_BEFORE_DAYS, CertificateExpiry, expiry_words
from weft_app.compose.home import WeftHome
from weft_app.config.config import DEFAULT_PORT, WeftConfig

DRIVER_SECONDS = 5.0
"""Timeout of NVIDIA's library, which hangs if a card does."""
MIN_AVAILABLE_BYTES = 1024**3
MAX_CARDS = 64
CONNECT_SECONDS = 3.0
"""Timeout of the connection to a provider, including the handshake."""
MAX_PROVIDERS = 64
"""Maximum number of providers to check, sorted by address."""
MAX_ASKED_AT_ONCE = 8
_AMD = "0x1002"
_DECLARE = "declare its memory: accelerators.declared"
_PORTS = {"https": 443, "http": 80}
_ACCELERATORS, _REGISTRIES, _CENTRAL = "accelerators", "registries", "central models"


class Verdict(StrEnum):
    """The result of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check, and the remedy."""

    check: str
    verdict: Verdict
    detail: str
    remedy: str = ""


def ok(check: str, detail: str, remedy: str = "") -> Finding:
    """Returns the finding of a check that passed."""
    return Finding(check, Verdict.OK, detail, remedy)


def warning(check: str, detail: str, remedy: str) -> Finding:
    """Returns the finding of a check that passed with a problem."""
    return Finding(check, Verdict.WARNING, detail, remedy)


def failed(check: str, detail: str, remedy: str) -> Finding:
    """Returns the finding of a check that failed."""
    return Finding(check, Verdict.FAILED, detail, remedy)


def attempt(check: str, look: Callable[[], str], remedy: str) -> Finding:
    """Runs a check. Returns its text, or the error that it raised."""
    try:
        return ok(check, look())
    except WeftError as error:
        return failed(check, error.message, remedy)


def platform_finding(platform: str, described: str, python: str) -> Finding:
    """Returns what works on a platform of `sys.platform`."""
    detail = f"weft {__version__}, Python {python}, {described}"
    match platform:
        case "linux":
            return ok("platform", detail)
        case "darwin":
            detail += ": commands, meshes and joined runners run here; tests run on Linux only"
            return warning("platform", detail, "report problems")
        case "win32":
            detail += ": commands on a mesh elsewhere work here (chat, get, apply, keys); up, serve, run and runner "
            detail += "join do not"
            remedy = "run the mesh in WSL (wsl --install), and name it in WEFT_URL (chat: WEFT_REGISTRY, WEFT_ROUTER)"
            return failed("platform", detail, remedy)
        case _:
            return warning("platform", f"{detail}: not supported by weft", "use Linux")


def memory_finding() -> Finding:
    """Returns how much memory there is."""
    memory = usable_memory()
    detail = f"{size_words(memory.available_bytes)} of {size_words(memory.total_bytes)} available"
    if memory.available_bytes < MIN_AVAILABLE_BYTES:
        return warning("memory", detail, "close other programs, or serve a smaller model")
    return ok("memory", detail)


def certificate_findings(config: WeftConfig) -> Iterator[Finding]:
    """Yields how long each configured certificate is valid."""
    now = datetime.now(UTC)
    for setting, end in CertificateExpiry(config).ends():
        detail = f"{setting} {expiry_words(end, now)}"
        if (end - now).days < WARN_BEFORE_DAYS:
            yield warning("certificate", detail, "replace the file: a running mesh takes the new one")
        else:
            yield ok("certificate", detail)


def accelerator_findings(
    platform: str, machine: str, nvidia: NvmlReading | None, system_folder: Path
) -> Iterator[Finding]:
    """Yields the accelerators by vendor, or one finding without any.

    `nvidia` is a reading of NVIDIA's library; None: it hung. `system_folder` is /sys.
    """
    found = list(_accelerators(platform, machine, nvidia, system_folder))
    none = "no NVIDIA or AMD driver, and no Apple GPU"
    yield from found or [ok(_ACCELERATORS, f"{none}: models run on the CPU unless their engine has its own driver")]


def _accelerators(platform: str, machine: str, nvidia: NvmlReading | None, system_folder: Path) -> Iterator[Finding]:
    if nvidia is None:
        why = f"NVIDIA's driver did not answer within {DRIVER_SECONDS:g} s"
        yield warning(_ACCELERATORS, why, "nvidia-smi")
    elif nvidia.health is Health.FAILED:
        yield warning(_ACCELERATORS, "NVIDIA's library fails", "nvidia-smi")
    elif nvidia.devices:
        cards = ", ".join(f"{device.name} ({size_words(device.total_bytes)})" for device in nvidia.devices)
        yield ok(_ACCELERATORS, f"NVIDIA: {cards}")
    if sizes := ", ".join(_amd_cards(system_folder)):
        yield ok(_ACCELERATORS, f"AMD: {sizes}; engines can use it, but weft does not lease its memory", _DECLARE)
    if platform == "darwin" and machine == "arm64":
        detail = "Apple GPU, which shares the memory of the machine: llama.cpp uses it (Metal)"
        yield ok(_ACCELERATORS, f"{detail}, weft does not lease its memory", _DECLARE)


def _amd_cards(system_folder: Path) -> Iterator[str]:
    """Yields each AMD card that the kernel's driver knows, with its memory."""
    with suppress(OSError):
        for card in sorted((system_folder / "class" / "drm").glob("card[0-9]*"))[:MAX_CARDS]:
            # Connectors such as card0-HDMI-A-1 have no such files.
            with suppress(OSError, ValueError):
                if (card / "device" / "vendor").read_text("ascii").strip() == _AMD:
                    size = int((card / "device" / "mem_info_vram_total").read_text("ascii"))
                    yield f"{card.name} ({size_words(size)})"


def port_findings(config: WeftConfig, running: Mapping[str, Any] | None) -> Iterator[Finding]:
    """Yields whether each port of a start is free. `running` is the description of a mesh on this home."""
    other = DEFAULT_PORT + 1 if config.port == DEFAULT_PORT else DEFAULT_PORT
    yield _port("", config.host, config.port, f"weft up --port {other}", running)
    if config.grpc_port is not None:
        remedy = f"weft up --grpc-port {config.grpc_port + 1}"
        yield _port(" (grpc_port)", "127.0.0.1", config.grpc_port, remedy, running)
    hooks = [hook for hook, why_off in listener_hooks(config.extensions.disabled) if not why_off]
    for name, listen, remedy in (
        ("relay.listen", config.relay.listen, "weft up --join-port PORT, or another port in relay.listen"),
        *((hook.setting, hook.address(config), f"another port in {hook.setting}") for hook in hooks),
    ):
        host, _, port = (listen or "").rpartition(":")
        if port.isdecimal():
            yield _port(f" ({name})", host.strip("[]"), int(port), remedy, running)


def _port(setting: str, host: str, port: int, remedy: str, running: Mapping[str, Any] | None) -> Finding:
    if running is not None and (running["url"].endswith(f":{port}") or _may_listen(running, port)):
        return ok("port", f"{port}{setting}: used by the mesh on this home")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        return failed("port", f"{port}{setting} on {host}: {why}", remedy)
    return ok("port", f"{port}{setting} is free")


def _may_listen(running: Mapping[str, Any], port: int) -> bool:
    """Whether a process of a running mesh listens on a port, or belongs to another user, so that this is unknown."""
    try:
        return any(
            each.laddr.port == port and each.status == psutil.CONN_LISTEN
            for pid in (running["pids"].get(name) for name in ("host", "edge"))
            for each in ([] if pid is None else psutil.Process(pid).net_connections("tcp"))
        )
    except psutil.Error:
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryState:
    """The state of a registry at one address."""

    address: str
    reach: Reach
    reason: str = ""
    """Why it does not serve, from its health; empty if this caller may not see it."""
    message: str = ""

    def words(self) -> str:
        """Returns it as text."""
        if self.reach is Reach.SERVING:
            return f"{self.address} owns the database"
        if self.reach is Reach.AWAY:
            return f"{self.address} does not answer"
        if self.reason == "standby":
            return f"{self.address} is its standby"
        return f"{self.address} does not serve{f' ({self.message})' if self.message else ''}"


def registry_findings(addresses: str | None) -> Iterator[Finding]:
    """Yields one finding about several registries; none for fewer than two addresses."""
    several = addresses_of(addresses or "")
    if len(several) > 1:
        with ThreadPoolExecutor(MAX_ASKED_AT_ONCE) as pool:
            yield finding_of(list(pool.map(_asked, several)))


def finding_of(states: Sequence[RegistryState]) -> Finding:
    """Returns the finding for the states of a mesh's registries."""
    owners = [each.address for each in states if each.reach is Reach.SERVING]
    words = "; ".join(each.words() for each in states)
    if not owners:
        remedy = "start one, or check the log of the one that fails"
        return failed(_REGISTRIES, f"no registry serves: {words}", remedy)
    if len(owners) > 1:
        detail = f"{' and '.join(owners)} each own a database"
        return failed(_REGISTRIES, detail, "give both the same registry.database_url")
    if any(each.reason == "standby_unfit" for each in states):
        return warning(_REGISTRIES, words, "copy the file, and restart it")
    if not any(each.reach is Reach.NOT_SERVING for each in states):
        return warning(_REGISTRIES, f"no standby: {words}", "start the other one")
    return ok(_REGISTRIES, words)


def _asked(address: str) -> RegistryState:
    try:
        reach = reach_of(call(address, health_pb2_grpc.HealthStub, "Check", READINESS, CHECK_TIMEOUT_SECONDS).status)
    except WeftError:
        return RegistryState(address=address, reach=Reach.AWAY)
    # A standby does not know the callers' keys.
    with suppress(WeftError):
        for each in health_of(address).components:
            if each.name == "owner":
                return RegistryState(address=address, reach=reach, reason=each.reason, message=each.message)
    return RegistryState(address=address, reach=reach)


def central_model_findings(models: Sequence[Document], secrets: Collection[str]) -> Iterator[Finding]:
    """Yields a finding per central model: whether its provider can be reached, and its secret is in `secrets`.

    Only connects, with a TLS handshake for https: sends no request and no key.
    """
    places = sorted({_place(model) for model in models})[:MAX_PROVIDERS]
    with ThreadPoolExecutor(MAX_ASKED_AT_ONCE, thread_name_prefix="providers") as pool:
        problems = dict(zip(places, pool.map(unreached_words, places), strict=True))
    for model in models:
        name, secret = model["name"], model["provider"].get("apiKeyRef", "").removeprefix(SECRET_PREFIX)
        if secret and secret not in secrets:
            yield failed(_CENTRAL, f"{name}: there is no secret/{secret}", f"weft keys secret create {secret} -")
        elif (problem := problems.get(_place(model))) is None:
            yield ok(_CENTRAL, f"{name}: not checked, as only {MAX_PROVIDERS} providers are")
        elif problem:
            yield failed(_CENTRAL, f"{name}: {problem}", f"check `provider.url`: weft get model {name} -o yaml")
        else:
            yield ok(_CENTRAL, f"{name}: its provider can be reached{', and its secret exists' if secret else ''}")


def _place(model: Document) -> tuple[str, int, bool]:
    """Returns the host and port of a model's provider, and whether it uses TLS."""
    parts = urlsplit(model["provider"]["url"])
    return parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 443), parts.scheme != "http"


def unreached_words(place: tuple[str, int, bool]) -> str:
    """Returns why a provider cannot be reached; empty if it can."""
    host, port, over_tls = place
    try:
        with socket.create_connection((host, port), CONNECT_SECONDS) as connection:
            if over_tls:
                with ssl.create_default_context().wrap_socket(connection, server_hostname=host):
                    pass
    except TimeoutError:
        return f"{host}:{port} does not answer within {CONNECT_SECONDS:g} s"
    except ssl.SSLCertVerificationError as error:
        return f"the certificate of {host}:{port} is refused: {error.verify_message}"
    except ssl.SSLError as error:
        return f"{host}:{port} does not speak TLS: {error.reason}"
    except (OSError, UnicodeError) as error:  # UnicodeError: the host is no name
        return f"{host}:{port} cannot be reached: {getattr(error, 'strerror', None) or error}"
    return ""


CHECK = "mesh"
PROCESS_CHECK = "process"
MAX_NAMED = 4
_VERSION = re.compile(r"(\d+)\.(\d+)")
ROUTER_PREFIX = "router/"
Healths = Sequence[tuple[str, pb.GetHealthResponse]]
"""Names such as `registry`, `gateway@edge-1` or `runner/gpu-0`, with the health of the process.

Processes of different versions on one host have the same name.
"""


def release_of(version: str) -> tuple[int, int] | None:
    """Returns the major and minor number of a version; None if it has none."""
    found = _VERSION.match(version)
    return None if found is None else (int(found[1]), int(found[2]))


def are_neighbours(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether two releases work together: they are equal or adjacent."""
    return one[0] == other[0] and abs(one[1] - other[1]) <= 1


def examine_versions(processes: Healths) -> Iterator[Finding]:
    """Yields a finding per process, then the mix of versions, and schemas that are too new for a process."""
    for name, health in processes:
        schemas = "".join(f", {each.service} schema {each.known_revision}" for each in health.schemas)
        if health.version:
            yield ok(PROCESS_CHECK, f"{name}: weft {health.version}{schemas}")
        else:
            yield warning(
                PROCESS_CHECK, f"{name}: an older release that does not report its version{schemas}", "upgrade it"
            )
    yield _mix(processes)
    yield from _schemas(processes)


def _mix(processes: Healths) -> Finding:
    releases = [(name, release_of(health.version)) for name, health in processes]
    known = sorted({release for _, release in releases if release is not None})
    if len(known) <= 1:
        versions = sorted({health.version for _, health in processes if health.version})
        return ok(CHECK, f"all on one release: {', '.join(versions) or 'unknown'}")
    oldest, newest = known[0], known[-1]
    behind = _named({name for name, release in releases if release == oldest})
    if are_neighbours(oldest, newest):
        detail = f"two adjacent releases, {_words(oldest)} and {_words(newest)}, which are compatible"
        return ok(CHECK, detail, f"still to upgrade: {behind}")
    detail = f"releases {_words(oldest)} to {_words(newest)}: only adjacent releases are compatible"
    return failed(CHECK, detail, f"upgrade these first: {behind}")


def _schemas(processes: Healths) -> Iterator[Finding]:
    found: dict[str, str] = {}
    for schema in (schema for _, health in processes for schema in health.schemas):
        # Revisions are numbers of equal width, empty if the process has not opened the database.
        found[schema.service] = max(found.get(schema.service, ""), schema.database_revision)
    for name, health in processes:
        for schema in health.schemas:
            newest = found[schema.service]
            if schema.known_revision < newest:
                detail = (
                    f"{name}: the {schema.service} database has the schema {newest}, and weft {health.version} knows "
                    f"{schema.known_revision}; it cannot reopen that database"
                )
                yield failed("schema", detail, f"upgrade {name}")


def _words(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"


def _named(names: Iterable[str]) -> str:
    found = sorted(names)
    more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    return ", ".join(found[:MAX_NAMED]) + more


def stored_prompt_findings(home: Path) -> Iterator[Finding]:
    """Yields one finding per runner that stores prompts: number, size and limit of those on disk and in memory."""
    members: list[Document] = []
    with suppress(WeftError), connect(home) as mesh:
        for model in mesh.get("/v1/admin/models")["items"]:
            members += model["replicas"]["members"]
    caches: dict[str, list[Document]] = {}
    for member in members:
        if member.get("cache", {}).get("storedLimitBytes"):
            caches.setdefault(member["runner"], []).append(member["cache"])
    for runner, found in sorted(caches.items()):
        count, size, kept, kept_size, kept_limit = (
            sum(each[field] for each in found)
            for field in ("storedPromptCount", "storedBytes", "keptPromptCount", "keptBytes", "keptLimitBytes")
        )
        limit = size_words(found[0]["storedLimitBytes"])
        memory = f"; {kept} in memory, {size_words(kept_size)} of {size_words(kept_limit)} (kept_prompts_mb)"
        yield ok(
            "stored prompts",
            f"runner {runner}: {count} stored, {size_words(size)} of {limit} (stored_prompts_mb)"
            f"{memory if kept_limit else ''}",
        )


def examine_mesh(home: Path) -> Iterator[Finding]:
    """Yields the findings of `weft doctor --mesh`."""
    try:
        runners, routers = _runners(home), ROUTERS.read(home)
    except WeftError as error:
        yield failed(CHECK, f"the registry does not answer: {error.message}", "weft status")
        return
    asked = _registries(home)
    known = {f"{ROUTER_PREFIX}{each['name']}": each.get("version", "") for each in routers}
    # `weft up` has registry and router in one process, so one call is enough.
    reached = {
        f"{ROUTER_PREFIX}{each['name']}": each["address"] for each in routers if each["address"] not in asked.values()
    }
    if not routers:
        reached |= _unregistered_router(home, asked)
    processes = {name: pb.GetHealthResponse(version=version) for name, version in known.items()}
    watching: list[pb.WatchingProcess] = []
    with ThreadPoolExecutor(max_workers=MAX_ASKED_AT_ONCE) as pool:
        for name, health in pool.map(_health_at, (asked | reached).items()):
            if isinstance(health, WeftError):
                yield warning(PROCESS_CHECK, f"{name} does not answer: {health.message}", "weft status")
                continue
            watching += health.watching_processes
            health.version = health.version or known.get(name, "")
            processes[name] = health
    ordered = {name: processes[name] for name in (*asked, *reached, *known) if name in processes}
    of_watch = _watching([each for each in watching if not (each.service == "router" and routers)])
    yield from examine_versions([*ordered.items(), *of_watch, *runners])


def _registries(home: Path) -> dict[str, str]:
    """Returns the addresses of the registry, and of its standby if configured."""
    addresses = addresses_of(mesh_address(home, "registry"))
    running = WeftHome(home.expanduser().absolute()).running()
    if running is not None and addresses == (running.get("grpc"),):
        return {MESH: addresses[0]}
    return {"registry" if len(addresses) == 1 else f"registry {address}": address for address in addresses}


def _unregistered_router(home: Path, others: Mapping[str, str]) -> dict[str, str]:
    """Returns the address of the commands' router if it is not registered: it has an older release."""
    try:
        address = mesh_address(home, "router")
    except WeftError:
        return {}
    return {} if address in others.values() else {"router": address}


def _health_at(process: tuple[str, str]) -> tuple[str, pb.GetHealthResponse | WeftError]:
    name, address = process
    try:
        return name, health_of(address)
    except WeftError as error:
        return name, error


def _watching(processes: Sequence[pb.WatchingProcess]) -> Healths:
    """Returns routers and gateways, with one entry per service, host and version."""
    counts = Counter((each.service, each.host, each.version) for each in processes)
    return [
        (f"{service}@{host}{f' ({count} times)' if count > 1 else ''}", pb.GetHealthResponse(version=version))
        for (service, host, version), count in counts.items()
    ]


def _runners(home: Path) -> Healths:
    with connect(home) as mesh:
        return [
            (f"{RUNNER_PREFIX}{each['name']}", pb.GetHealthResponse(version=each["status"].get("version", "")))
            for each in mesh.documents(ResourceKind.RUNNER)
            if each["status"]["state"] == "active"
        ]
