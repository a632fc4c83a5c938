"""`weft stop` and `weft status` of a home, with a process that has locked it as `weft up` does."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from cli_harness import scripted_mesh
from typer.testing import CliRunner, Result

from weft.api.operations.v1.process_service_pb2 import GetHealthResponse
from weft.api.registry.v1.model_pb2 import Model, ModelManifest
from weft_app.cli.main import app
from weft_app.cli.options import EXIT_NOT_FOUND, EXIT_OK, EXIT_TIMEOUT
from weft_app.compose.home import WeftHome

MESH = """
import signal, sys
from pathlib import Path
from weft_app.compose.home import WeftHome
home = WeftHome(Path(sys.argv[1]))
home.create()
signals = {signal.SIGTERM}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
with home.claim():
    if len(sys.argv) > 3:
        home.announce({"url": "http://127.0.0.1:9", "grpc": "unix:" + sys.argv[1] + "/none.sock",
                       "startTime": "2026-01-01T00:00:00+00:00"})
    print("up", flush=True)
    for _ in range(int(sys.argv[2])):
        signal.sigwait(signals)
"""


DRAINING = """
import asyncio, sys
from pathlib import Path
from types import SimpleNamespace
from weft_app.cli import foreground
from weft_app.compose.home import WeftHome

class Host:
    stage_count = 0
    async def start(self, show): pass
    async def stop(self): await asyncio.Event().wait()
    def kill_runners(self): pass

async def first_access(*_, **__): pass
foreground.first_access, foreground.ready_text = first_access, lambda *_: "up\\n"
home = WeftHome(Path(sys.argv[1]))
home.create()
with home.claim():
    asyncio.run(foreground._run(Host(), SimpleNamespace(drain_seconds=600.0), home, None))
"""
"""`weft up` with a request that does not end."""


Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as started:
        yield lambda *args: started.enter_context(_mesh(tmp_path, *args))


@contextmanager
def _mesh(home: Path, signals: int = 1, *announced: str) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-c", MESH, str(home), str(signals), *announced]
    with _started(command) as process:
        yield process


@contextmanager
def _started(command: list[str]) -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        try:
            yield process
        finally:
            process.kill()


def _weft(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_stop_ends_the_mesh_of_this_home_and_reports_it(start: Start, tmp_path: Path) -> None:
    mesh = start()
    done = _weft("stop", "--home", tmp_path)
    assert (done.exit_code, done.stdout) == (EXIT_OK, f"stopped the mesh on {tmp_path}\n")
    assert mesh.wait(10) == 0


def test_second_stop_does_nothing(start: Start, tmp_path: Path) -> None:
    start()
    _weft("stop", "--home", tmp_path)
    again = _weft("stop", "--home", tmp_path)
    assert (again.exit_code, again.stderr) == (EXIT_OK, f"weft: weft is not running (home {tmp_path})\n")


def test_stop_does_not_create_a_missing_home(tmp_path: Path) -> None:
    assert _weft("stop", "--home", tmp_path / "none").exit_code == EXIT_OK
    assert not (tmp_path / "none").exists()


def test_stop_timeout_reports_draining_and_suggests_now(start: Start, tmp_path: Path) -> None:
    mesh = start(2)
    waiting = _weft("stop", "--home", tmp_path, "--timeout", "200ms")
    assert waiting.exit_code == EXIT_TIMEOUT
    assert (
        f"(pid {mesh.pid}) is still finishing requests after 200ms; cancel them with weft stop --now" in waiting.stderr
    )
    assert mesh.poll() is None
    assert _weft("stop", "--home", tmp_path).exit_code == EXIT_OK


@pytest.mark.slow("imports what `weft up` imports, and waits half a second between two signals")
def test_stop_now_does_not_wait_for_running_requests(tmp_path: Path) -> None:
    with _started([sys.executable, "-c", DRAINING, str(tmp_path)]) as mesh:
        done = _weft("stop", "--now", "--home", tmp_path, "--timeout", "5s")
        assert (done.exit_code, done.stdout) == (EXIT_OK, f"stopped the mesh on {tmp_path}\n"), done.stderr
        assert mesh.wait(10) == 0


def test_killed_mesh_does_not_count_as_running(start: Start, tmp_path: Path) -> None:
    mesh = start(1, "announced")
    mesh.send_signal(signal.SIGKILL)
    mesh.wait(10)
    assert WeftHome(tmp_path).running() is not None, "it had no time to remove its file"
    assert _weft("status", "--home", tmp_path).exit_code == EXIT_NOT_FOUND
    assert _weft("stop", "--home", tmp_path).exit_code == EXIT_OK


def test_status_distinguishes_a_starting_mesh_from_a_running_one(start: Start, tmp_path: Path) -> None:
    mesh = start()
    facts = json.loads(_weft("status", "-o", "json", "--home", tmp_path).stdout)
    assert (facts["state"], facts["pid"]) == ("starting", mesh.pid)


def test_status_reports_why_models_are_unknown(start: Start, tmp_path: Path) -> None:
    mesh = start(1, "announced")
    done = _weft("status", "-o", "json", "--home", tmp_path)
    facts = json.loads(done.stdout)
    assert (done.exit_code, facts["state"], facts["pid"]) == (EXIT_OK, "running", mesh.pid)
    assert facts["problem"]
    assert "models" not in facts


def test_status_of_a_home_without_a_mesh_is_stopped(tmp_path: Path) -> None:
    done = _weft("status", "--home", tmp_path)
    assert done.exit_code == EXIT_NOT_FOUND
    assert "stopped" in done.stdout


def test_separately_running_services_count_as_a_running_mesh(tmp_path: Path) -> None:
    home = WeftHome(tmp_path)
    home.create()
    with scripted_mesh(tmp_path / "scripted") as mesh:
        mesh.add(Model(manifest=ModelManifest(name="qwen"), runner="r1", status=Model.STATUS_ACTIVE))
        mesh.add(Model(manifest=ModelManifest(name="typo"), runner="r1", status=Model.STATUS_FAILED))
        address = json.loads((mesh.home / "run" / "up.json").read_text())["grpc"]
        mesh.serve()
        url = json.loads((mesh.home / "run" / "up.json").read_text())["url"]
        home.address_file("registry").write_text(address)
        home.address_file("gateway").write_text(url)
        with socket.create_server(("127.0.0.1", 0)) as ended:
            home.address_file("router").write_text(f"127.0.0.1:{ended.getsockname()[1]}")
        done = _weft("status", "-o", "json", "--home", tmp_path)
        shown = _weft("status", "--home", tmp_path).stdout
    facts = json.loads(done.stdout)
    assert (done.exit_code, facts["state"], facts["url"]) == (EXIT_OK, "running", url)
    assert facts["services"] == {"registry": address, "gateway": url}, "the router was killed: nothing listens there"
    assert [(model["name"], model["status"]) for model in facts["models"]] == [("qwen", "active"), ("typo", "failed")]
    assert f"registry at {address}, gateway at {url} (weft serve)" in shown


def test_standalone_runner_counts_as_running(tmp_path: Path) -> None:
    """It was stopped, with exit code 3, while `weft serve runner` ran."""
    home = WeftHome(tmp_path)
    home.create()
    with socket.create_server(("127.0.0.1", 0)) as runner:
        address = f"127.0.0.1:{runner.getsockname()[1]}"
        (home.run / "runner-gpu-0.address").write_text(address)
        with patch("weft_app.cli.grpc_calls.health_of", return_value=GetHealthResponse(status="ok")):
            done = _weft("status", "-o", "json", "--home", tmp_path)
    facts = json.loads(done.stdout)
    assert (done.exit_code, facts["state"], facts["services"]) == (EXIT_OK, "running", {"runner/gpu-0": address})
    assert [each["process"] for each in facts["health"]] == ["runner/gpu-0"]


def test_files_of_killed_services_are_not_a_mesh(tmp_path: Path) -> None:
    home = WeftHome(tmp_path)
    home.create()
    home.address_file("registry").write_text(f"unix:{tmp_path}/none.sock")
    home.address_file("gateway").write_text("http://127.0.0.1:1")
    assert _weft("status", "--home", tmp_path).exit_code == EXIT_NOT_FOUND
