"""`weft mesh health`: what it asks, and its exit codes."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from typer.testing import CliRunner, Result

from weft_app.cli.main import app
from weft_app.cli.options import EXIT_FAILED, EXIT_NOT_FOUND, EXIT_OK
from weft_app.compose.home import WeftHome

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def _weft(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["mesh", "health", *(str(word) for word in words)])


@contextmanager
def _served(home: Path, file: str, *, ready: bool, live: bool = True) -> Iterator[None]:
    """A process with this health, whose address is in a file of the home."""
    folder = WeftHome(home)
    folder.create()
    servicer = health.HealthServicer()
    servicer.set("readiness", SERVING if ready else NOT_SERVING)
    servicer.set("liveness", SERVING if live else NOT_SERVING)
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    folder.address_file(file).write_text(f"127.0.0.1:{port}")
    try:
        yield
    finally:
        server.stop(0).wait()


@pytest.mark.parametrize(
    ("ready", "live", "options", "code"),
    [
        (True, True, (), EXIT_OK),
        (False, True, (), EXIT_FAILED),
        (False, True, ("--live",), EXIT_OK),
        (True, False, ("--live",), EXIT_FAILED),
    ],
)
def test_process_is_healthy_if_it_is_ready_or_live_as_asked(
    tmp_path: Path, ready: bool, live: bool, options: tuple[str, ...], code: int
) -> None:
    with _served(tmp_path, "runner", ready=ready, live=live):
        assert _weft("--home", tmp_path, *options).exit_code == code


def test_each_process_is_listed_and_one_that_is_not_ready_fails_the_probe(tmp_path: Path) -> None:
    with _served(tmp_path, "router", ready=True):
        pass
    with _served(tmp_path, "registry", ready=True), _served(tmp_path, "runner-box", ready=False):
        done = _weft("--home", tmp_path, "-o", "json")
    assert done.exit_code == EXIT_FAILED
    assert {each["process"]: each["health"] for each in json.loads(done.stdout)["items"]} == {
        "registry": "ready",
        "router": "no answer",
        "runner/box": "not ready",
    }


def test_home_without_a_process_has_another_exit_code_than_one_that_starts(tmp_path: Path) -> None:
    done = _weft("--home", tmp_path)
    assert done.exit_code == EXIT_NOT_FOUND
    assert "weft is not running on this home" in done.stderr
    folder = WeftHome(tmp_path)
    folder.create()
    with folder.claim():
        assert _weft("--home", tmp_path).exit_code == EXIT_FAILED
