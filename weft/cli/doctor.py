"""`weft doctor`: what this machine has and lacks, each with its remedy."""

import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from runner_svc.backends.key_variables import read_key
from weft import __version__
from weft.cli.doctor_memory import unowned_leases
from weft.cli.options import DEFAULT_HOME, EXIT_FAILED, ConfigOption, HomeOption, OutputFormat, OutputOption, reporting
from weft.cli.output import Column, print_resources
from weft.client.resources import connect_registry
from weft.host.config import DEFAULT_PORT, WeftConfig, load_config
from weft.host.demo import configured_runners, llama_command
from weft.host.home import MAX_SOCKET_PATH_BYTES, WeftHome
from weft.kernel.errors import WeftError
from weft.resources.documents import ModelDocument
from weft.resources.kinds import ResourceKind

MIN_FREE_BYTES = 1024**3


class Verdict(StrEnum):
    """How a check went."""

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


def doctor(
    home: HomeOption = DEFAULT_HOME,
    config: ConfigOption = None,
    port: Annotated[int | None, typer.Option("--port", "-p", help="HTTP port to check.")] = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Check what a mesh on this machine needs. Exit code 1 when something is missing.

    Example: weft doctor -o json
    """
    with reporting():
        folder = WeftHome(home.expanduser().absolute())
        findings = list(examine(folder, config, port))
        columns = (
            Column("CHECK", lambda row: row["check"]),
            Column("", lambda row: row["verdict"]),
            Column("DETAIL", lambda row: row["detail"]),
            Column("REMEDY", lambda row: row["remedy"] or "-"),
        )
        print_resources("FindingList", [asdict(finding) for finding in findings], columns, output)
        if any(finding.verdict is Verdict.FAILED for finding in findings):
            raise typer.Exit(EXIT_FAILED)


def examine(home: WeftHome, config_path: Path | None, port: int | None) -> Iterator[Finding]:
    """Every check, in the order in which a start would meet it."""
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
    yield Finding(check="configuration", verdict=Verdict.OK, detail=str(config_path or "defaults"))
    yield _attempt("models", lambda: _models(config), "name a file that exists")
    yield from _keys(config)
    if config.runners is None or any(runner.runtime == "llama_server" for runner in config.runners):
        yield _attempt("llama.cpp server", _server, "pip install xllamacpp")
    yield _port(home, port if port is not None else config.port)
    if home.running() is not None:
        yield from _engines(home)


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
    told = []
    for runner in configured_runners(config):
        without_file = "a provider's" if runner.runtime == "openai_remote" else "a server that runs already"
        told += [f"{model.name} ({model.path or without_file})" for model in runner.models]
    return ", ".join(told)


def _keys(config: WeftConfig) -> Iterator[Finding]:
    """Whether the variables hold keys that models need; what they hold is not shown."""
    models = [model for runner in config.runners or () for model in runner.models]
    waiting: dict[str, list[str]] = {}
    for model in models:
        if model.api_key_env is not None:
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


def _server() -> str:
    return " ".join(llama_command(None))


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


def _engines(home: WeftHome) -> Iterator[Finding]:
    """How the engines of the mesh on this home did: one finding per model whose engine ended because of a fault."""
    try:
        with connect_registry(home=home.root) as registry:
            documents = registry.documents(ResourceKind.MODEL)
    except WeftError as error:
        yield Finding(check="engines", verdict=Verdict.WARNING, detail=error.message, remedy="weft events")
        return
    statuses = [document.status for document in documents if isinstance(document, ModelDocument)]
    faulty = [status.instance for status in statuses if status and status.instance and status.instance.fault_count]
    for instance in faulty:
        count = instance.fault_count
        yield Finding(
            check="engines",
            verdict=Verdict.WARNING,
            detail=f"{instance.model}: ended {count} {'time' if count == 1 else 'times'} because of a fault, "
            f"the last time: {instance.last_fault or 'unknown'}",
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
