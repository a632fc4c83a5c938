"""`weft doctor`: checks of this machine and its mesh, each fault with its remedy."""

import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from router_svc.store.promises import PromiseFile
from runner_svc.environments.folder import EnvironmentFolder
from runner_svc.runtimes.runtime import ModelFault
from runner_svc.runtimes.settings import ModelSettings, SleepingModelSettings, UpstreamSettings
from runner_svc.runtimes.table import DEFAULT_RUNTIME, built_in_names, installed, require_runtime
from runner_svc.runtimes.unmanaged_server import read_key
from weft import __version__
from weft.api.registry.v1 import lease_pb2, lease_service_pb2
from weft.client._channel import mesh_address
from weft.client._lease_renewal import LeaseClient
from weft.client.resources import connect_registry
from weft.documents.codec import seconds_of
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import ModelDocument, RunnerDocument
from weft.gpu.nvml import Health, read_within
from weft.kernel.clock import offset_words
from weft.kernel.errors import WeftError
from weft.kernel.units import size_words
from weft_app.cli.options import (
    DEFAULT_HOME,
    EXIT_FAILED,
    ConfigOption,
    HomeOption,
    OutputFormat,
    OutputOption,
)
from weft_app.cli.output import Column, Listing
from weft_app.cli.provider_checks import check_central_models
from weft_app.cli.secrets import all_secrets
from weft_app.compose.demo import configured_runners
from weft_app.compose.home import MAX_SOCKET_PATH_BYTES, WeftHome
from weft_app.config.config import CONFIG_NAME, DEFAULT_PORT, WeftConfig
from weft_app.config.loader import config_files, load_config

MIN_FREE_BYTES = 1024**3
DRIVER_SECONDS = 5.0
"""Timeout of NVIDIA's library, which hangs where a card does."""
MAX_NAMED_LEASES = 4


class Verdict(StrEnum):
    """The result of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check and what to do about it."""

    check: str
    verdict: Verdict
    detail: str
    remedy: str = ""


_FINDINGS = Listing(
    columns=(
        Column("CHECK", lambda finding: finding.check),
        Column("", lambda finding: finding.verdict),
        Column("DETAIL", lambda finding: finding.detail),
        Column("REMEDY", lambda finding: finding.remedy),
    ),
    kind="FindingList",
    document=asdict,
)


def doctor(
    home: HomeOption = DEFAULT_HOME,
    config: ConfigOption = None,
    port: Annotated[int | None, typer.Option("--port", "-p", help="HTTP port to check.")] = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Check what a mesh on this machine needs. Exit code 1 when something is missing.

    Example: weft doctor -o json
    """
    folder = WeftHome(home.expanduser().absolute())
    findings = list(examine(folder, config, port))
    _FINDINGS.print(findings, output)
    if any(finding.verdict is Verdict.FAILED for finding in findings):
        raise typer.Exit(EXIT_FAILED)


def examine(home: WeftHome, config_path: Path | None, port: int | None) -> Iterator[Finding]:
    """Yields the findings of all checks, in the order of a start."""
    yield _platform()
    yield _packages()
    yield _home(home)
    yield from _memory(home)
    yield _socket_path(home)
    try:
        config = load_config(config_path)
    except WeftError as error:
        yield _failed("configuration", error.message, "correct the file")
        return
    yield _startable(config, home, config_path)
    yield _kept_tasks(home, config)
    yield _attempt("models", lambda: _models(config), "name a file that exists")
    yield from _keys(config)
    yield from _runtimes()
    yield from _servers(config)
    yield _accelerators()
    yield from _requirements(config, home.environments)
    yield from _programs(config)
    yield _port(home, port if port is not None else config.port)
    if home.running() is not None:
        yield from _engines(home)
    yield from _central_models(home)
    yield from _clocks(home)


def _platform() -> Finding:
    detail = f"weft {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    if sys.platform != "linux":
        return Finding(check="platform", verdict=Verdict.WARNING, detail=detail, remedy="only Linux is tested")
    return Finding(check="platform", verdict=Verdict.OK, detail=detail)


def _packages() -> Finding:
    wanted = {"fastapi": "gateway", "uvicorn": "gateway", "sqlalchemy": "registry", "alembic": "registry"}
    missing = sorted(package for package in wanted if find_spec(package) is None)
    if missing:
        extras = ",".join(sorted({wanted[package] for package in missing}))
        return _failed("packages", f"missing: {', '.join(missing)}", f"in your checkout: pip install '.[{extras}]'")
    return Finding(check="packages", verdict=Verdict.OK, detail="gateway and registry can run here")


def _home(home: WeftHome) -> Finding:
    running = home.running()
    if running is not None:
        pid = running["pids"]["host"]
        return Finding(
            check="home", verdict=Verdict.OK, detail=f"{home.root}: a mesh runs here (pid {pid}, {running['url']})"
        )
    try:
        home.create()
    except WeftError as error:
        return _failed("home", error.message, "choose another with --home")
    free = shutil.disk_usage(home.root).free
    if free < MIN_FREE_BYTES:
        return Finding(
            check="home",
            verdict=Verdict.WARNING,
            detail=f"{home.root}: {free // 1024**2} MiB free",
            remedy="make room, or choose another disk with --home",
        )
    return Finding(check="home", verdict=Verdict.OK, detail=f"{home.root}: {free // 1024**3} GiB free")


def _memory(home: WeftHome) -> Iterator[Finding]:
    unowned = unowned_leases(home)
    if unowned:
        yield Finding(
            check="memory",
            verdict=Verdict.WARNING,
            detail=f"held without an owner: {unowned}",
            remedy="weft unload MODEL, or restart that runner",
        )


def _kept_tasks(home: WeftHome, config: WeftConfig) -> Finding:
    """Whether the router's database has what was acknowledged with it, as far as its last start saw."""
    kept = PromiseFile(home.promises)
    notice = kept.notice()
    if notice:
        return Finding(check="tasks", verdict=Verdict.WARNING, detail=notice, remedy=kept.remedy)
    database = home.state / "router.db"
    is_here = not config.router.database_url and home.promises.exists()
    if is_here and home.running() is not None and not database.exists():
        return _failed(
            "tasks", f"{database} is gone, so the running mesh accepts no tasks", "put it back, or restart the mesh"
        )
    return Finding(check="tasks", verdict=Verdict.OK, detail="nothing acknowledged is known to be missing")


def _socket_path(home: WeftHome) -> Finding:
    length = len(os.fsencode(home.run / "runner-local.sock"))
    if length > MAX_SOCKET_PATH_BYTES:
        return Finding(
            check="sockets",
            verdict=Verdict.WARNING,
            detail=f"the path is {length} bytes long, loopback ports are used instead",
            remedy="a shorter --home",
        )
    return Finding(check="sockets", verdict=Verdict.OK, detail=str(home.run))


def _models(config: WeftConfig) -> str:
    models = [model for runner in configured_runners(config) for model in runner.models]
    return ", ".join(f"{model.name} ({model.location})" if model.location else model.name for model in models)


def _startable(config: WeftConfig, home: WeftHome, config_path: Path | None) -> Finding:
    """Runs the checks of `weft up` before it starts anything."""
    files = ", ".join(str(file) for file in config_files(config_path)) or f"defaults (there is no ./{CONFIG_NAME})"
    # The services of a mesh are imported here alone: without their packages there is nothing to check, and `packages`
    # reports them.
    if _packages().verdict is Verdict.FAILED:
        return Finding(check="configuration", verdict=Verdict.OK, detail=files)
    from weft_app.compose.up import require_startable  # noqa: PLC0415

    try:
        require_startable(config, home)
    except WeftError as error:
        return _failed("configuration", f"{files}: {error.message}", "correct the file; `weft up` refuses it")
    return Finding(check="configuration", verdict=Verdict.OK, detail=files)


def _runtimes() -> Iterator[Finding]:
    """Yields the runtimes that a configuration may name, and those of other packages that cannot be used."""
    others = installed()
    usable = [f"{each.name} ({each.package})" for each in others if each.runtime is not None]
    yield Finding(check="runtimes", verdict=Verdict.OK, detail=", ".join([*built_in_names(), *usable]))
    for each in others:
        if each.runtime is None:
            yield _failed(
                "runtimes", f"{each.name} of {each.package}: {each.fault}", "update or uninstall that package"
            )


def _servers(config: WeftConfig) -> Iterator[Finding]:
    """Yields whether each server that runs already serves the model that it is configured for."""
    for runner in config.runners or ():
        find_fault = runner.engine.find_fault
        if find_fault is not None:
            yield from (_server(model, find_fault(model, os.environ)) for model in runner.models)


def _server(model: ModelSettings, fault: ModelFault | None) -> Finding:
    if fault is None:
        return Finding(check="server", verdict=Verdict.OK, detail=f"{model.name}: its server answers and has it")
    detail = f"{model.name}: {fault.message}"
    if not fault.is_there and isinstance(model, SleepingModelSettings) and model.wake is not None:
        return Finding(check="server", verdict=Verdict.OK, detail=f"{detail}; the first request wakes it")
    verdict = Verdict.WARNING if fault.is_there else Verdict.FAILED
    return Finding(check="server", verdict=verdict, detail=detail, remedy=fault.remedy)


def _requirements(config: WeftConfig, environments: EnvironmentFolder) -> Iterator[Finding]:
    """Whether the programs, libraries and environments of the configured runtimes are installed; each is named once."""
    configured = [(runner.runtime, runner.command) for runner in config.runners or ()]
    runners = [(DEFAULT_RUNTIME, None)] if config.runners is None else configured
    for name, command in dict.fromkeys(runners):
        runtime = require_runtime(name)
        needed, environment = runtime.requirement, runtime.environment
        if needed is not None:
            yield _attempt(needed.name, partial(needed.find, command), needed.remedy)
        if environment is not None and not command:
            look = partial(environments.description, environment)
            yield _attempt("environment", look, environments.install_command(environment.name))


def _programs(config: WeftConfig) -> Iterator[Finding]:
    """Yields whether the program of each model that has one of its own is installed."""
    for runner in config.runners or ():
        find_fault = runner.engine.find_program_fault
        if find_fault is None:
            continue
        for model in runner.models:
            fault = find_fault(model, runner.command, os.environ)
            if fault is None:
                yield Finding(check="program", verdict=Verdict.OK, detail=f"{model.name}: its program is installed")
            else:
                yield _failed("program", f"{model.name}: {fault.message}", fault.remedy)


def _accelerators() -> Finding:
    """Returns the cards that the driver reports; after DRIVER_SECONDS it counts as hanging."""
    reading = read_within(DRIVER_SECONDS)
    if reading is None:
        return Finding(
            check="accelerators",
            verdict=Verdict.WARNING,
            detail=f"NVIDIA's driver did not answer within {DRIVER_SECONDS:g} s",
            remedy="nvidia-smi",
        )
    match reading.health:
        case Health.WELL if reading.devices:
            cards = ", ".join(f"{device.name} ({size_words(device.total_bytes)})" for device in reading.devices)
            return Finding(check="accelerators", verdict=Verdict.OK, detail=cards)
        case Health.FAILED:
            return Finding(
                check="accelerators", verdict=Verdict.WARNING, detail="NVIDIA's library fails", remedy="nvidia-smi"
            )
        case _:
            detail = "no NVIDIA card or driver here: models run on the CPU unless their engine brings another"
            return Finding(check="accelerators", verdict=Verdict.OK, detail=detail)


def _keys(config: WeftConfig) -> Iterator[Finding]:
    """Whether the variables hold keys that models need; what they hold is not shown."""
    models = [model for runner in config.runners or () for model in runner.models]
    waiting: dict[str, list[str]] = {}
    for model in models:
        if isinstance(model, UpstreamSettings) and model.api_key_env is not None:
            waiting.setdefault(model.api_key_env, []).append(model.name)
    for variable, names in sorted(waiting.items()):
        try:
            read_key(variable, os.environ)
        except WeftError as error:
            yield _failed(
                "keys", f"{', '.join(names)}: {error.message}", f"export {variable}=... before you start weft"
            )
        else:
            yield Finding(check="keys", verdict=Verdict.OK, detail=f"{variable} is set, for {', '.join(names)}")


def _port(home: WeftHome, port: int) -> Finding:
    running = home.running()
    if running is not None and running["url"].endswith(f":{port}"):
        return Finding(check="port", verdict=Verdict.OK, detail=f"{port}: used by the mesh on this home")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            other = DEFAULT_PORT + 1 if port == DEFAULT_PORT else DEFAULT_PORT
            return _failed("port", f"{port}: {error.strerror}", f"weft up --port {other}")
    return Finding(check="port", verdict=Verdict.OK, detail=f"{port} is free")


def _has_registry(home: WeftHome) -> bool:
    return home.running() is not None or (home.run / "registry.sock").exists()


def _central_models(home: WeftHome) -> Iterator[Finding]:
    """Yields one finding per central model, where a registry runs on this home. No key is sent to anybody."""
    if not _has_registry(home):
        return
    check = "central models"
    try:
        with connect_registry(home=home.root) as registry:
            documents = registry.documents(ResourceKind.MODEL)
        manifests = [document.manifest for document in documents if isinstance(document, ModelDocument)]
        if not any(manifest.HasField("provider") for manifest in manifests):
            return
        secrets = {secret.name for secret in all_secrets(home.root)}
    except WeftError as error:
        yield Finding(check=check, verdict=Verdict.WARNING, detail=error.message, remedy="weft get models")
        return
    for found in check_central_models(manifests, secrets):
        if found.problem:
            yield _failed(check, f"{found.model}: {found.problem}", found.remedy)
        else:
            detail = f"{found.model}: its provider can be reached, and its secret exists"
            yield Finding(check=check, verdict=Verdict.OK, detail=detail)


def _clocks(home: WeftHome) -> Iterator[Finding]:
    """Yields one finding per runner whose clock is notably off, where a registry runs on this home."""
    if not _has_registry(home):
        return
    try:
        with connect_registry(home=home.root) as registry:
            documents = registry.documents(ResourceKind.RUNNER)
    except WeftError:
        return
    for document in documents:
        if not isinstance(document, RunnerDocument) or document.observed is None:
            continue
        capability = document.observed.capability
        offset = seconds_of(capability, "clock_offset")
        if offset and document.state == "active":
            refused = "; it takes no requests" if capability.clock_refused else ""
            yield Finding(
                check="clock",
                verdict=Verdict.FAILED if capability.clock_refused else Verdict.WARNING,
                detail=f"runner {document.name}: {offset_words(offset)}{refused}",
                remedy=f"set the clock of {document.observed.host} right (NTP)",
            )


def _engines(home: WeftHome) -> Iterator[Finding]:
    """Yields one finding per model of the mesh on this home whose engine ended because of a fault."""
    try:
        with connect_registry(home=home.root) as registry:
            documents = registry.documents(ResourceKind.MODEL)
    except WeftError as error:
        yield Finding(check="engines", verdict=Verdict.WARNING, detail=error.message, remedy="weft events")
        return
    instances = [document.instance for document in documents if isinstance(document, ModelDocument)]
    faulty = [instance for instance in instances if instance is not None and instance.fault_count]
    for instance in faulty:
        count = instance.fault_count
        yield Finding(
            check="engines",
            verdict=Verdict.WARNING,
            detail=f"{instance.model}: ended {count} {'time' if count == 1 else 'times'} because of a fault, "
            f"the last time: {instance.last_fault.detail or 'unknown'}",
            remedy=f"weft describe model/{instance.model}",
        )
    if not faulty:
        yield Finding(check="engines", verdict=Verdict.OK, detail="none ended because of a fault")


def _attempt(check: str, look: Callable[[], str], remedy: str) -> Finding:
    try:
        return Finding(check=check, verdict=Verdict.OK, detail=look())
    except WeftError as error:
        return _failed(check, error.message, remedy)


def _failed(check: str, detail: str, remedy: str) -> Finding:
    return Finding(check=check, verdict=Verdict.FAILED, detail=detail, remedy=remedy)


def unowned_leases(home: WeftHome) -> str | None:
    """Returns the leases without an owner, as text; empty: none. None: no mesh runs here, or it is unreachable."""
    if home.running() is None:
        return None
    calls = LeaseClient(mesh_address(home.root, "registry"), lease_pb2.LeaseHolder())
    try:
        return unowned_text(calls.hosts())
    except WeftError:
        return None
    finally:
        calls.close()


def unowned_text(hosts: Iterable[lease_service_pb2.HostMemory]) -> str:
    """Returns the leases without an owner on these hosts, as text; empty: every lease has one."""
    found = [(host.host, lease) for host in hosts for lease in host.leases if lease.unowned]
    words = [
        f"{size_words(sum(share.bytes for share in lease.shares))} on {host} for {lease.purpose} of {lease.holder.name}"
        for host, lease in found[:MAX_NAMED_LEASES]
    ]
    more = f" and {len(found) - MAX_NAMED_LEASES} more" if len(found) > MAX_NAMED_LEASES else ""
    return ", ".join(words) + more
