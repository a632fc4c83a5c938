"""The processes of a mesh with their versions, from the registry and the processes themselves."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from weft.api.operations.v1 import process_service_pb2 as pb
from weft.client._home import mesh_address
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.address import addresses_of
from weft.kernel.errors import WeftError
from weft_app.cli.findings import Finding, Verdict, failed
from weft_app.cli.mesh_documents import connect_documents
from weft_app.cli.mesh_versions import CHECK, PROCESS_CHECK, KnownSchema, MeshProcess, examine_versions
from weft_app.cli.process_calls import MESH, RUNNER_PREFIX, health_of
from weft_app.cli.router_table import read_routers
from weft_app.compose.home import WeftHome

ROUTER_PREFIX = "router/"
MAX_ASKED_AT_ONCE = 8


def examine_mesh(home: Path) -> Iterator[Finding]:
    """Yields the findings of `weft doctor --mesh`."""
    try:
        runners, routers = list(_runners(home)), read_routers(home)
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
