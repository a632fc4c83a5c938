"""`weft logs` of the mesh, its services and its runners: from the files of a home."""

import json
import os
import signal
import subprocess
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cli_harness import ScriptedMesh
from kit.warm_python import warm
from typer.testing import CliRunner, Result

from weft.kernel.telemetry.structured_logs import BoundedLogFile
from weft_app.cli import mesh_logs
from weft_app.cli.main import app
from weft_app.cli.mesh_logs import LogFile
from weft_app.compose.home import WeftHome

pytest_plugins = ("cli_mesh",)
HOUR_AGO = datetime.now(UTC) - timedelta(hours=1)
WAIT_SECONDS = 30


def _line(event: str, component: str = "weft.gateway", minutes: float = 0, **values: Any) -> str:
    at = (HOUR_AGO + timedelta(minutes=minutes)).isoformat().replace("+00:00", "Z")
    fields = values | {"event": event, "component": component, "service": "host", "level": "info", "timestamp": at}
    return json.dumps(fields) + "\n"


def _weft(home: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["logs", *words, "--home", str(home)])


def _events(done: Result) -> list[str]:
    return [json.loads(line)["event"] for line in done.stdout.splitlines()]


@pytest.fixture
def home(tmp_path: Path) -> WeftHome:
    """A home whose mesh has run, with two parts of its log."""
    home = WeftHome(tmp_path / "home")
    home.create()
    (home.logs / "host.log.1").write_text(
        _line("registry open", "weft.registry.store") + _line("task is lost", "weft.tasks", 1)
    )
    (home.logs / "host.log").write_text(
        _line("rejected", "weft.request", 50, request_id="req-1", trace_id="t" * 32, reason="no model", agent=None)
        + _line("listens", minutes=55, url="http://127.0.0.1:1")
    )
    (home.logs / "runner-local.log").write_text(_line("session open", "weft.session", 20))
    (home.logs / "runner-local.out").write_text("runner serves\n")
    os.utime(home.logs / "runner-local.out", (HOUR_AGO.timestamp(),) * 2)
    (home.logs / "relay.log").write_text(_line("relayed", "weft.relay"))
    return home


@pytest.mark.parametrize(
    ("words", "events"),
    [
        ([], ["registry open", "task is lost", "rejected", "listens"]),
        (["mesh", "--tail", "2"], ["rejected", "listens"]),
        (["-n", "0"], []),
        (["gateway"], ["rejected", "listens"]),
        (["router"], ["task is lost"]),
        (["registry"], ["registry open"]),
        (["relay"], ["relayed"]),
        (["runner/local"], ["runner serves", "session open"]),
        (["local"], ["runner serves", "session open"]),
        # The hour counts from the start of the tests, which may be minutes ago.
        (["--since", "45m"], ["rejected", "listens"]),
        (["--since", (HOUR_AGO + timedelta(minutes=54)).isoformat()], ["listens"]),
        (["--request", "req-1"], ["rejected"]),
        (["--request", "t" * 32], ["rejected"]),
        (["router", "--request", "req-1"], []),
    ],
)
def test_each_name_and_option_selects_its_lines_of_a_stopped_mesh(
    home: WeftHome, words: list[str], events: list[str]
) -> None:
    done = _weft(home.root, *words, "-o", "json")
    assert done.exit_code == 0, done.stderr
    assert _events(done) == events


def test_human_readable_line_has_time_level_component_event_and_values(home: WeftHome) -> None:
    (line,) = _weft(home.root, "--request", "req-1").stdout.splitlines()
    at = (HOUR_AGO + timedelta(minutes=50)).astimezone()
    assert line.startswith(f"{at:%Y-%m-%d %H:%M:%S}.")
    assert line.split()[2:] == ["info", "request", "rejected", "request_id=req-1", f"trace_id={'t' * 32}",
                                'reason="no', 'model"']  # fmt: skip


def test_traceback_and_truncated_line_are_sanitized(home: WeftHome) -> None:
    frames = [{"filename": "a.py", "lineno": 3, "name": "fail"}]
    failed = _line(
        "failed", minutes=59, exception=[{"exc_type": "ValueError", "exc_value": "so\x1b[2J", "frames": frames}]
    )
    (home.logs / "host.log").write_bytes(failed.encode() + b'{"event": "torn\xff\x07\n[1]\n{"a": 1}\n\n')
    lines = _weft(home.root, "-n", "6").stdout.splitlines()
    assert [line.strip() for line in lines[-5:]] == [
        "ValueError: so [2J", "a.py:3 in fail", '{"event": "torn\ufffd', "[1]", '{"a": 1}',
    ]  # fmt: skip


def test_standalone_service_shows_every_line_of_its_file(home: WeftHome) -> None:
    (home.logs / "gateway.log").write_text(_line("tls renewed", "weft.tls", 52))
    assert _events(_weft(home.root, "gateway", "-o", "json")) == ["rejected", "tls renewed", "listens"]


def test_background_start_output_is_shown_until_a_mesh_runs(home: WeftHome) -> None:
    (home.logs / "up.out").write_text("\nweft: port 8080 is taken\n")
    assert _weft(home.root).stdout.splitlines()[-1] == "weft: port 8080 is taken"
    with home.claim():
        assert "8080" not in _weft(home.root).stdout


def test_filter_reports_how_many_lines_it_hides(home: WeftHome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_logs, "MAX_LINES", 3)
    done = _weft(home.root, "--since", "2h")
    assert len(done.stdout.splitlines()) == 3
    assert "weft: 1 earlier lines are omitted" in done.stderr


def test_home_without_logs_suggests_what_to_do(tmp_path: Path) -> None:
    for words in ((), ("gateway",), ("-f",)):
        done = _weft(tmp_path, *words)
        assert done.exit_code == 3
        assert (
            f"there are no logs in {tmp_path / 'logs'}: no mesh has run "
            "on this home. Start one with `weft up" in done.stderr
        )


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (["gatway"], 3, "there is no model, runner or service gatway; did you mean gateway?"),
        (["runner/locl"], 3, "there is no runner locl; did you mean local?"),
        (["qwen"], 1, "weft is not running"),
        (["--since", "soon"], 2, "--since: must be a time"),
        (["--since", "2026-99-01"], 2, "--since: must be a time such as 2026-05-04T10:00:00Z"),
        (["--request", "a b"], 2, "--request: must be"),
        (["a", "b"], 2, "NAME: name one model, service or runner"),
        (["runner/../x"], 2, "NAME: must be"),
        (["-n", "1001"], 2, "must be at most 1000"),
        (["task/task-1", "-o", "json"], 2, "--since, --request, --output: are only for the logs of the mesh"),
    ],
)
def test_name_without_logs_is_rejected(home: WeftHome, words: list[str], code: int, why: str) -> None:
    done = _weft(home.root, *words)
    assert (done.exit_code, done.stdout) == (code, "")
    assert why in done.stderr


def test_unknown_log_name_suggests_models_of_a_running_mesh(mesh: ScriptedMesh) -> None:
    done = mesh.run("logs", "sol")
    assert done.exit_code == 3
    assert "there is no model, runner or service sol; did you mean solo?" in done.stderr


def test_follow_continues_over_a_rotation_and_ends_with_ctrl_c(home: WeftHome) -> None:
    file = BoundedLogFile(home.logs / "host.log", 10**6)
    command = [*warm("kit.patient_weft"), "logs", "gateway", "-f", "-n", "1", "-o", "json", "--home", str(home.root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as weft:
        killer = threading.Timer(WAIT_SECONDS, weft.kill)
        killer.start()
        try:
            assert weft.stdout is not None
            assert json.loads(weft.stdout.readline())["event"] == "listens"
            file.write(_line("before"))
            file.write(_line("of another", "weft.router"))
            (home.logs / "host.log").replace(home.logs / "host.log.1")
            file.write(_line("to the old file"))
            file.close()
            file = BoundedLogFile(home.logs / "host.log", 10**6)
            file.write(_line("after"))
            assert [json.loads(weft.stdout.readline())["event"] for _ in range(3)] == [
                "before", "to the old file", "after",
            ]  # fmt: skip
            weft.send_signal(signal.SIGINT)
            assert weft.wait() == 0
        finally:
            killer.cancel()
            weft.kill()
            file.close()


def test_double_rotation_reports_lost_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text("1\n")
    with LogFile(path) as file:
        assert [piece.data for piece in file.past()] == [b"1\n"]
        path.rename(tmp_path / "x.log.1")
        path.write_text("2\n")
        assert [piece.data for piece in file.new()] == [b"2\n"]
        assert not file.take_lost()
        path.rename(tmp_path / "between")
        (tmp_path / "x.log.1").write_text("3\n")
        path.write_text("4\n5")
        assert [piece.data for piece in file.new()] == [b"4\n"]
        assert file.take_lost()
        assert not file.take_lost()


def test_truncated_or_late_file_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "up.out"
    with LogFile(path) as file:
        assert list(file.past()) == list(file.new()) == []
        path.write_text("first start\nha")
        assert [piece.data for piece in file.new()] == [b"first start\n"]
        path.write_text("again\n")
        assert [piece.data for piece in file.new()] == [b"again\n"]


def test_reads_and_lines_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_logs, "MAX_READ_BYTES", 8)
    monkeypatch.setattr(mesh_logs, "MAX_LINE_BYTES", 4)
    path = tmp_path / "x.log"
    path.write_bytes(b"one\ntwo\n12345\n")
    with LogFile(path) as file:
        assert [piece.data for piece in file.past()] == [b"1234", b"5\n"]
