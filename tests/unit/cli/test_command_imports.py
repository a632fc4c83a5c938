"""What commands import, and what runs without the modules that Windows lacks."""

import fcntl
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler
from importlib import import_module
from inspect import signature
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from threading import Thread
from typing import get_args
from zipfile import ZipFile

import pytest
from kit.forked_programs import Ended, Program, run_forked
from typer.models import ArgumentInfo

from weft_app.cli import commands, main
from weft_app.cli.completion import FIRST_WORDS, NAMES

pytestmark = pytest.mark.slow("starts interpreters")

CALL = "from weft_app.cli.main import app\napp(prog_name='weft')"
SHARED = "import weft_app.cli.main"
HELP_IMPORTS = {
    *("weft", "weft.extension", "weft.kernel", "weft.kernel.machine", "weft.kernel.machine.memory_tuning"),
    "weft_app.cli.extension_commands",
    *("weft_app", "weft_app.cli", "weft_app.cli.commands", "weft_app.cli.inherited", "weft_app.cli.main"),
    "weft_app.cli.terminal",
}
"""Modules of weft that the help of all commands may import."""
OWN = {"weft", "weft_app", "gateway", "registry_svc", "router_svc", "runner_svc"}
HEAVY = {"pydantic", "grpc", "google", "yaml", "structlog", "asyncio"}
LARGE = {"pydantic", "rich", "yaml", "structlog", "msgspec"}
"""Libraries that take longer to import than most commands take."""
OF_SERVICES = {*("fastapi", "starlette", "uvicorn", "psycopg", "weft.sql", "aiohttp"), "weft_app.compose"}
READING = ("get", "describe", "declare", "wait", "events", "chat", "ps", "completion")
BARE_GROUPS = ("mesh", "models")
"""Groups with all commands in GROUPS: `weft models discover` listens before it imports the configuration."""
HELP = ("--help", "--version", "completion of commands")
NAMED = tuple(
    f"weft {words} "
    for words in (
        *("chat", "load", "load --ctx 9", "describe model", "config edit model"),
        *("mesh wait --for ready model", "cancel"),
    )
)
"""Lines whose completion needs no module of a service."""
COMPLETED = {
    **{line: set[str]() for line in NAMED},
    # The settings of a load are checked by pydantic.
    "weft load --": {"pydantic"},
}
"""Lines, and the large library that the completion of each needs."""
COMMANDS = ("ps", "get models -o json", "describe x", "explain x")
FAST = (
    *("get models", "get all -o json", "get agents -o wide", "describe pool p", "events", "status", "ps"),
    *("get requests", "get clients", "get tasks", "get tenants", "explain r", "cancel request r"),
    *("logs m -n 5", "get secrets", "get leases", "get routers", "mesh usage", "config get", "top --once"),
)
"""Commands over the HTTP API."""
CALLS_NOTHING_OF_THE_MESH = {"grpc", "google", "yaml", "asyncio", "gateway", "registry_svc", "router_svc", "runner_svc"}
WITHOUT_POSIX = """
import importlib, sys
# psutil has another module for Windows, and reads these for Linux.
importlib.import_module("psutil")
for name in ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty"):
    sys.modules[name] = None
import weft_app.cli.main, weft_app.cli.foreground, weft_app.cli.serve, weft_app.cli.runner
"""
ON_WINDOWS = """
import sys
import weft_app.cli.main
sys.platform = "win32"
weft_app.cli.main.app()
"""
LOAD_ALL = """
from weft_app.cli.commands import COMMANDS
from weft_app.cli.main import load
for path in COMMANDS:
    load(path)
"""
SERVING = ("up", "serve registry", "runner join weft://x")


def completing(line: str) -> dict[str, str]:
    return {"_WEFT_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()))}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Ended]:
    """Returns how each program ended, by its name here."""
    folder = tmp_path_factory.mktemp("commands")
    nowhere = {"WEFT_HOME": str(folder / "none")}
    programs = {
        "--help": Program(CALL, ["--help"]),
        "--version": Program(CALL, ["--version"]),
        **{f"{group} --help": Program(CALL, [group, "--help"]) for group in BARE_GROUPS},
        "completion of commands": Program(CALL, environment=completing("weft ")),
        "runtimes": Program("import runner_svc.runtimes.table as table\ntable.built_in()"),
        "reading": Program("import " + ", ".join(f"weft_app.cli.{name}" for name in READING)),
        **{line: Program(CALL, environment={**completing(line), **nowhere}) for line in COMPLETED},
        **{words: Program(CALL, words.split(), nowhere) for words in COMMANDS},
        "up --help": Program(CALL, ["up", "--help"]),
        "doctor": Program(CALL, ["doctor", "--home", str(folder / "doctor"), "--port", "0", "-o", "json"]),
    }
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        taken_port = ["up", "--no-demo", "--discover=no", "--port", port]
        programs["up"] = Program(CALL, taken_port, nowhere)
        programs["up without output"] = Program(
            f"import sys\nsys.stdout = open('/dev/full', 'w')\n{CALL}", taken_port, nowhere
        )
        return dict(zip(programs, run_forked(list(programs.values()), folder, shared=SHARED), strict=True))


@pytest.mark.parametrize("name", HELP)
def test_help_and_completion_import_no_command(name: str, ended: Mapping[str, Ended]) -> None:
    program = ended[name]
    assert (program.code, bool(program.stdout)) == (0, True), program.stderr
    assert {each for each in program.modules if each.split(".")[0] in OWN} <= HELP_IMPORTS
    assert program.modules & HEAVY == set()


@pytest.mark.parametrize("group", BARE_GROUPS)
def test_help_of_a_group_imports_none_of_its_commands(group: str, ended: Mapping[str, Ended]) -> None:
    program = ended[f"{group} --help"]
    assert (program.code, list(commands.GROUPS[group])[-1] in program.stdout) == (0, True), program.stderr
    places = (commands.COMMANDS[f"{group} {name}"][0] for name in commands.GROUPS[group])
    modules = {f"weft_app.cli.{place.partition(':')[0]}" for place in places}
    assert program.modules & {*modules, *HEAVY} <= {"pydantic"}


def test_help_of_a_tree_in_an_archive_opens_no_module(tmp_path: Path) -> None:
    archive = tmp_path / "tree.zip"
    root = Path(main.__file__).parents[2]
    with ZipFile(archive, "w") as tree:
        for name in HELP_IMPORTS:
            place = root / name.replace(".", "/")
            file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
            tree.write(file, file.relative_to(root))
    ended = subprocess.run(
        [sys.executable, "-c", CALL, "--help"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(archive)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, "Start a mesh on this machine" in ended.stdout) == (0, True), ended.stderr


def test_read_commands_need_no_service_library(ended: Mapping[str, Ended]) -> None:
    assert ended["reading"].code == 0, ended["reading"].stderr
    assert ended["reading"].modules & OF_SERVICES == set()


def test_doctor_checks_a_configuration_without_its_services(ended: Mapping[str, Ended]) -> None:
    """Half of its time went into importing the gateway, to check its settings."""
    assert '"check": "configuration"' in ended["doctor"].stdout, ended["doctor"].stderr
    services = {f"{each}.service" for each in ("gateway", "router_svc", "registry_svc", "runner_svc")}
    assert ended["doctor"].modules & (services | {"fastapi", "starlette", "uvicorn", "aiohttp"}) == set()


def test_up_prints_a_line_before_it_imports_the_configuration(ended: Mapping[str, Ended]) -> None:
    assert ended["up"].stdout.startswith("starting weft ")
    assert ended["up --help"].modules & {*LARGE, "weft_app.config"} <= {"rich"}


def test_up_continues_if_its_first_line_cannot_be_written(ended: Mapping[str, Ended]) -> None:
    """It ended with "the output cannot be written", and behind a closed pipe with exit code 0."""
    assert "is taken by another program" in ended["up without output"].stderr


def test_up_refuses_a_taken_port_before_it_imports_the_services(ended: Mapping[str, Ended]) -> None:
    assert (ended["up"].code, ended["up"].stderr.count("is taken by another program")) == (4, 1)
    assert "weft_app.compose.up" not in ended["up"].modules


def test_runtime_descriptors_import_no_engine(ended: Mapping[str, Ended]) -> None:
    """A command that reads a configuration pays for the settings, not for the engines."""
    assert ended["runtimes"].code == 0, ended["runtimes"].stderr
    assert ended["runtimes"].modules & {"aiohttp", "grpc", "structlog", "weft.api"} == set()


@pytest.mark.parametrize("line", COMPLETED)
def test_completion_imports_no_large_library(line: str, ended: Mapping[str, Ended]) -> None:
    program = ended[line]
    assert (program.code, program.stderr) == (0, "")
    assert program.modules & {*LARGE, "weft_app.compose"} <= COMPLETED[line]
    if line in NAMED:
        assert program.modules & {"grpc", "google", "asyncio"} == set()


@pytest.mark.parametrize(("command", "complete"), [*FIRST_WORDS.items(), *NAMES.items()])
def test_completion_table_matches_the_commands(command: str, complete: object) -> None:
    module, _, function = f"weft_app.cli.{commands.COMMANDS[command][0]}".partition(":")
    parameters = signature(getattr(import_module(module), function), eval_str=True).parameters.values()
    found = [each for own in parameters for each in get_args(own.annotation) if isinstance(each, ArgumentInfo)]
    assert found[0].autocompletion is complete


@pytest.mark.parametrize("words", COMMANDS)
def test_command_imports_no_large_library_that_it_does_not_use(words: str, ended: Mapping[str, Ended]) -> None:
    assert "start it with `weft up`" in ended[words].stderr
    assert ended[words].modules & LARGE == set()


class _Answers(BaseHTTPRequestHandler):
    """The HTTP API of a mesh of one pool."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        at = "2026-01-02T03:04:05Z"
        request = {
            "requestId": "r",
            "tenant": "t",
            "target": "p",
            "priority": "normal",
            "state": "ended",
            "arrivedAt": at,
        }
        pool = {"kind": "pool", "name": "p", "status": {"explicit": False, "conditions": []}}
        path = self.path.partition("?")[0]
        items = [pool] if path.endswith("/pools") else []
        health = {"status": "ok", "components": []}
        others = {"hosts": [], "hasMore": False, "allowCloudFallback": True}
        listed = {"items": items, "total": 0, "historyMissing": False, **others, **health}
        named = {"p": pool, "m": {"kind": "model", "name": "m", "status": {}}, "logs": {"lines": ["a"]}}
        found = request if "/requests/" in path else named.get(path.rpartition("/")[2], listed)
        body = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815

    def address_string(self) -> str:
        return "home"

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Ended]]:
    """Returns how commands over the HTTP API of a home ended."""
    folder = tmp_path_factory.mktemp("fast")
    with tempfile.TemporaryDirectory() as home:
        run = Path(home) / "run"
        run.mkdir()
        (run / "up.json").write_text(
            json.dumps({"grpc": "127.0.0.1:1", "state": "running", "url": "http://127.0.0.1:1"})
        )
        programs = [Program(CALL, words.split(), {"WEFT_HOME": home}) for words in FAST]
        with (
            (run / "up.lock").open("w") as lock,
            ThreadingUnixStreamServer(str(run / "http.sock"), _Answers) as server,
        ):
            fcntl.flock(lock, fcntl.LOCK_EX)
            Thread(target=server.serve_forever, daemon=True).start()
            yield dict(zip(FAST, run_forked(programs, folder, shared=SHARED), strict=True))
            server.shutdown()


@pytest.mark.parametrize("words", FAST)
def test_http_command_imports_no_service_grpc_or_protobuf(words: str, fast: Mapping[str, Ended]) -> None:
    ended = fast[words]
    assert (ended.code, bool(ended.stdout)) == (0, True), ended.stderr
    assert ended.modules & (LARGE | CALLS_NOTHING_OF_THE_MESH | OF_SERVICES - {"weft_app.compose"}) == set()


@pytest.fixture(scope="module")
def on_windows(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Ended]:
    """Returns how commands end in a Python without the modules that Windows lacks.

    Those that serve run in one that is also called Windows once all is imported.
    """
    folder = tmp_path_factory.mktemp("windows")
    home = ["--home", str(folder / "home")]
    programs = {
        "--help": Program(CALL, ["--help"]),
        "doctor": Program(CALL, ["doctor", *home, "-o", "json"]),
        "every command": Program(LOAD_ALL),
        **{command: Program(ON_WINDOWS, [*command.split(), *home]) for command in SERVING},
    }
    return dict(zip(programs, run_forked(list(programs.values()), folder, shared=WITHOUT_POSIX), strict=True))


def test_help_and_doctor_run_without_modules_missing_on_windows(on_windows: Mapping[str, Ended]) -> None:
    assert on_windows["--help"].code == 0, on_windows["--help"].stderr
    assert "doctor" in on_windows["--help"].stdout
    checked = on_windows["doctor"]
    assert checked.stdout.startswith("{"), checked.stderr
    assert '"platform"' in checked.stdout
    assert "Traceback" not in checked.stderr


def test_every_command_is_imported_without_modules_missing_on_windows(on_windows: Mapping[str, Ended]) -> None:
    assert on_windows["every command"].code == 0, on_windows["every command"].stderr


@pytest.mark.parametrize("command", SERVING)
def test_serving_command_is_refused_on_windows_with_a_remedy(command: str, on_windows: Mapping[str, Ended]) -> None:
    refused = on_windows[command]
    assert refused.code == 1
    assert "on Windows run it in WSL" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_forked_program_reports_its_imports_and_failure(tmp_path: Path) -> None:
    """The control of all of these."""
    wave, failed = run_forked([Program("import wave, sys\nprint(sys.argv[1])", ["a"]), Program("1 / 0")], tmp_path)
    assert (wave.code, wave.stdout, "wave" in wave.modules) == (0, "a\n", True)
    assert (failed.code, "ZeroDivisionError" in failed.stderr, "wave" in failed.modules) == (1, True, False)
