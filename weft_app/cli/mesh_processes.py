"""The processes of a mesh with their versions, from the registry and the processes themselves.

Neighbouring releases run together: decision 0001. A process whose database has a newer schema than it knows goes on
until it is restarted, and is refused then.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from weft.api.operations.v1 import process_service_pb2 as pb
from weft.client._home import mesh_address
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.address import addresses_of
from weft.kernel.errors import WeftError
from weft_app.cli.findings import Finding, Verdict, failed
from weft_app.cli.mesh_documents import connect_documents
from weft_app.cli.process_calls import MESH, RUNNER_PREFIX, health_of
from weft_app.cli.records import ROUTERS
from weft_app.compose.home import WeftHome

CHECK = "mesh"
PROCESS_CHECK = "process"
MAX_NAMED = 4
_VERSION = re.compile(r"(\d+)\.(\d+)")
ROUTER_PREFIX = "router/"
MAX_ASKED_AT_ONCE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownSchema:
    """The schema of one service's tables, as a process knows it and as its database has it."""

    service: str
    known: str
    found: str = ""
    """Empty: the process has not opened the database."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshProcess:
    """One process of a mesh."""

    name: str
    """Such as `registry`, `gateway@edge-1` or `runner/gpu-0`."""
    version: str
    """Empty: it is of a release that does not say it."""
    schemas: tuple[KnownSchema, ...] = ()


def release_of(version: str) -> tuple[int, int] | None:
    """Returns the major and minor number of a version; None where it has none."""
    found = _VERSION.match(version)
    return None if found is None else (int(found[1]), int(found[2]))


def are_neighbours(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether two releases run together: the same one, or the one before or after it."""
    return one[0] == other[0] and abs(one[1] - other[1]) <= 1


def examine_versions(processes: Sequence[MeshProcess]) -> Iterator[Finding]:
    """Yields a finding for each process, then what the mesh mixes, and the schemas that are too new for a process."""
    for process in processes:
        schemas = "".join(f", {each.service} schema {each.known}" for each in process.schemas)
        version = f"weft {process.version}" if process.version else "of a release that does not say its version"
        verdict = Verdict.OK if process.version else Verdict.WARNING
        remedy = "" if process.version else "upgrade it"
        yield Finding(check=PROCESS_CHECK, verdict=verdict, detail=f"{process.name}: {version}{schemas}", remedy=remedy)
    yield _mix(processes)
    yield from _schemas(processes)


def _mix(processes: Sequence[MeshProcess]) -> Finding:
    releases = {process.name: release_of(process.version) for process in processes}
    known = sorted({release for release in releases.values() if release is not None})
    if len(known) <= 1:
        versions = sorted({process.version for process in processes if process.version})
        return Finding(check=CHECK, verdict=Verdict.OK, detail=f"one release: {', '.join(versions) or 'unknown'}")
    oldest, newest = known[0], known[-1]
    behind = _named(name for name, release in releases.items() if release == oldest)
    if are_neighbours(oldest, newest):
        detail = f"two neighbouring releases, {_words(oldest)} and {_words(newest)}, which run together"
        return Finding(check=CHECK, verdict=Verdict.OK, detail=detail, remedy=f"to end the upgrade: {behind}")
    detail = f"releases {_words(oldest)} to {_words(newest)}: only neighbouring ones run together"
    return failed(CHECK, detail, f"upgrade first: {behind}")


def _schemas(processes: Sequence[MeshProcess]) -> Iterator[Finding]:
    found: dict[str, str] = {}
    for process in processes:
        for schema in process.schemas:
            # Revisions are numbers of the same width.
            found[schema.service] = max(found.get(schema.service, ""), schema.found)
    for process in processes:
        for schema in process.schemas:
            newest = found[schema.service]
            if schema.known < newest:
                detail = (
                    f"{process.name}: the {schema.service} database has the schema {newest}, and weft "
                    f"{process.version} knows {schema.known}; it does not open that database again"
                )
                yield failed("schema", detail, f"upgrade {process.name}")


def _words(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"


def _named(names: Iterable[str]) -> str:
    found = sorted(names)
    more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    return ", ".join(found[:MAX_NAMED]) + more


def examine_mesh(home: Path) -> Iterator[Finding]:
    """Yields the findings of `weft doctor --mesh`."""
    try:
        runners, routers = list(_runners(home)), ROUTERS.read(home)
    except WeftError as error:
        yield failed(CHECK, f"the registry does not answer: {error.message}", "weft status")
        return
    asked = _registries(home)
    known = {f"{ROUTER_PREFIX}{each['name']}": each.get("version", "") for each in routers}
    # In the process of `weft up` the router is asked with the registry.
    reached = {
        f"{ROUTER_PREFIX}{each['name']}": each["address"] for each in routers if each["address"] not in asked.values()
    }
    if not routers:
        reached |= _unregistered_router(home, asked)
    processes: dict[str, MeshProcess] = {name: MeshProcess(name=name, version=known[name]) for name in known}
    watching: list[pb.WatchingProcess] = []
    with ThreadPoolExecutor(max_workers=MAX_ASKED_AT_ONCE) as pool:
        for name, health in pool.map(_asked, (asked | reached).items()):
            if isinstance(health, WeftError):
                detail = f"{name} does not answer: {health.message}"
                yield Finding(check=PROCESS_CHECK, verdict=Verdict.WARNING, detail=detail, remedy="weft status")
                continue
            found = _process(name, health)
            processes[name] = found if found.version else replace(found, version=known.get(name, ""))
            watching += health.watching_processes
    of_watch = _watching([each for each in watching if not (each.service == "router" and routers)])
    ordered = [processes[name] for name in dict.fromkeys((*asked, *reached, *known)) if name in processes]
    yield from examine_versions([*ordered, *of_watch, *runners])


def _registries(home: Path) -> dict[str, str]:
    """Returns the addresses of the registry, and of its standby where one is named."""
    addresses = addresses_of(mesh_address(home, "registry"))
    running = WeftHome(home.expanduser().absolute()).running()
    if running is not None and addresses == (running.get("grpc"),):
        return {MESH: addresses[0]}
    return {"registry" if len(addresses) == 1 else f"registry {address}": address for address in addresses}


def _unregistered_router(home: Path, others: Mapping[str, str]) -> dict[str, str]:
    """Returns the address of the router that commands use, where it does not register: it is of an older release."""
    try:
        address = mesh_address(home, "router")
    except WeftError:
        return {}
    return {} if address in others.values() else {"router": address}


def _asked(process: tuple[str, str]) -> tuple[str, pb.GetHealthResponse | WeftError]:
    name, address = process
    try:
        return name, health_of(address)
    except WeftError as error:
        return name, error


def _process(name: str, health: pb.GetHealthResponse) -> MeshProcess:
    schemas = tuple(
        KnownSchema(service=each.service, known=each.known_revision, found=each.database_revision)
        for each in health.schemas
    )
    return MeshProcess(name=name, version=health.version, schemas=schemas)


def _watching(processes: Sequence[pb.WatchingProcess]) -> Iterator[MeshProcess]:
    """Yields routers and gateways; those of one service, host and version are one entry."""
    counts = Counter((each.service, each.host, each.version) for each in processes)
    for (service, host, version), count in counts.items():
        times = f" ({count} times)" if count > 1 else ""
        yield MeshProcess(name=f"{service}@{host}{times}", version=version)


def _runners(home: Path) -> Iterator[MeshProcess]:
    with connect_documents(home) as mesh:
        for runner in mesh.documents(ResourceKind.RUNNER):
            if runner["status"]["state"] == "active":
                version = runner["status"].get("version", "")
                yield MeshProcess(name=f"{RUNNER_PREFIX}{runner['name']}", version=version)
