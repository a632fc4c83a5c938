"""`weft status`: the state of the mesh on this machine."""

import socket
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import typer

from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors.error_tree import WeftError
from weft_app.cli.mesh_api import Document, api_socket, connect
from weft_app.cli.options import DEFAULT_HOME, EXIT_NOT_FOUND, HomeOption, OutputFormat, PageOutputOption
from weft_app.cli.output import custom_columns, page, print_page, table_block
from weft_app.compose.home import WeftHome, state_of

PROBE_SECONDS = 1.0
"""Timeout for connecting to a service of `weft serve`."""
_UNIX = "unix:"

_FACTS = custom_columns(
    "Home:home State:state Process:pid Up_for:startTime:age Base_URL:url:{}/v1 gRPC:grpc Services Config Logs:logs "
    "Health Problem:problem",
    Services=lambda facts: (
        ", ".join(f"{name} at {address}" for name, address in facts["services"].items()) + " (weft serve)"
        if "services" in facts
        else None
    ),
    Config=lambda facts: ", ".join(facts["config"]) or "none" if "config" in facts else None,
    Health=lambda facts: (
        ", ".join(f"{each['process']}: {each['status']}" for each in facts["health"] if each["status"] != "ok") or "ok"
        if "health" in facts
        else None
    ),
)
_HEALTH = custom_columns("PROCESS:process COMPONENT:component STATE:state SINCE:since:age REASON:message|reason")
_MODELS = custom_columns("NAME:name STATUS:status RUNNER:runner")


def status(output: PageOutputOption = OutputFormat.TABLE, home: HomeOption = DEFAULT_HOME) -> None:
    """Show the state of the mesh of a home: uptime, addresses, health of its processes, and models.

    Services of `weft serve` on the home count as a mesh. Exit code 3 if none runs.

    Example: weft status -o json
    """
    facts = _facts(WeftHome(home.expanduser().absolute()))
    print_page(output, lambda: "\n".join((*_lines(facts), "")), lambda: facts)
    if facts["state"] == "stopped":
        raise typer.Exit(EXIT_NOT_FOUND)


def _facts(home: WeftHome) -> dict[str, Any]:
    facts: dict[str, Any] = {"home": str(home.root), "state": "stopped", "logs": str(home.logs)}
    if not home.is_claimed():
        return facts | _of_services(home)
    facts["state"] = "starting"
    if (process := home.owner()) is not None:
        facts["pid"] = process
    if (running := home.running()) is None:
        return facts
    facts["state"] = state_of(running)
    facts["health"] = _healths(home, running["grpc"])
    facts.update((name, running[name]) for name in ("startTime", "url", "grpc", "config") if name in running)
    return facts | _models(Path(home.root))


def _of_services(home: WeftHome) -> dict[str, Any]:
    """Returns the services that `weft serve` runs on this home; empty if there are none."""
    found = home.served() | home.served_runners()
    served = {name: address for name, address in found.items() if is_reachable(address)}
    if not served:
        return {}
    # The address of a gateway is a URL; its gRPC is on a socket of the home.
    places = {name: home.address(name) if name == "gateway" else address for name, address in served.items()}
    health = [_health(name, partial(_asked_itself, address)) for name, address in places.items()]
    facts: dict[str, Any] = {"state": "running", "services": served, "health": health}
    if "gateway" in served:
        facts["url"] = served["gateway"]
    if "registry" not in served:
        return facts | {
            "problem": "the registry does not run on this home: run weft status on "
            "the registry's home to see the models"
        }
    return facts | _models(Path(home.root))


def is_reachable(address: str) -> bool:
    """Whether something listens at an address, since a killed service leaves its file."""
    try:
        if address.startswith(_UNIX):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(PROBE_SECONDS)
                probe.connect(address.removeprefix(_UNIX))
            return True
        place = urlsplit(address if "://" in address else f"//{address}")
        with socket.create_connection((place.hostname or "", place.port or 0), PROBE_SECONDS):
            return True
    except (OSError, ValueError):
        return False


def _models(home: Path) -> dict[str, Any]:
    try:
        with connect(home) as mesh:
            return {
                "models": [
                    {
                        "name": each["name"],
                        "status": each["status"]["state"],
                        "runner": each["status"].get("runner", ""),
                    }
                    for each in mesh.documents(ResourceKind.MODEL)
                ]
            }
    except WeftError as error:
        return {"problem": error.message}


def _healths(home: WeftHome, mesh: str) -> list[dict[str, Any]]:
    """Returns the health of the processes of `weft up`: the mesh, then its runners."""
    runners = [each.stem.removeprefix("runner-") for each in sorted(home.run.glob("runner-*.sock"))]
    if api_socket(Path(home.root)) is None:
        places = [(f"runner/{name}", f"unix:{home.run / f'runner-{name}.sock'}") for name in runners]
        return [_health(name, partial(_asked_itself, address)) for name, address in (("mesh", mesh), *places)]
    with connect(Path(home.root)) as api:
        ask = partial(api.get, "/v1/admin/process-health")
        names = ("mesh", *(f"runner/{name}" for name in runners))
        return [_health(name, partial(ask, process=name)) for name in names]


def _health(process: str, ask: Callable[[], Document]) -> dict[str, Any]:
    """Returns the health of a process from `ask`; unhealthy if it does not answer.

    Answers of other releases may lack fields.
    """
    try:
        answer = ask()
    except WeftError as error:
        return {"process": process, "status": "no_answer", "message": error.message, "components": []}
    components = [
        {
            "name": each.get("name", ""),
            "state": each.get("state", ""),
            "reason": each.get("reason", ""),
            "message": each.get("message", ""),
            "since": datetime.fromisoformat(each["sinceTime"]).isoformat() if "sinceTime" in each else "",
        }
        for each in answer.get("components", ())
    ]
    return {"process": process, "status": answer.get("status", ""), "message": "", "components": components}


def _asked_itself(address: str) -> Document:
    from weft.documents.codec import document_of  # noqa: PLC0415 - it needs protobuf
    from weft_app.cli.grpc_calls import health_of  # noqa: PLC0415 - a mesh of `weft up` is asked over HTTP

    return document_of(health_of(address))


def _unwell(processes: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
    """Yields a row per unhealthy component and per process without an answer."""
    for process in processes:
        name = process["process"]
        if process["message"]:
            row = {"component": "", "state": process["status"], "reason": "", "since": ""}
            yield {"process": name, **row, "message": process["message"]}
        for each in process["components"]:
            if each["state"] != "ok":
                values = {key: each[key] for key in ("state", "reason", "message", "since")}
                yield {"process": name, "component": each["name"], **values}


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    yield from page(_FACTS, facts)
    if unwell := list(_unwell(facts.get("health", []))):
        yield from table_block("Not well", _HEALTH, unwell)
    yield from table_block("Models", _MODELS, facts.get("models", ()), is_cut=True)
