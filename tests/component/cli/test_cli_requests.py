"""`weft explain`, `weft get requests` and `weft get clients`, against a real RequestService over a router's own log."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from kit.home_gateway import home_gateway
from kit.request_endings import ending
from typer.testing import CliRunner, Result

from router_svc.client_registry import ClientRegistry, ClientsConfig
from router_svc.figures import FiguresRecorder
from router_svc.policy.decisions import Loads, Placed, Rejects, Waits, Wakes
from router_svc.policy.endpoints.candidates import Candidate, Readiness
from router_svc.policy.endpoints.choice import Choice, Considered
from router_svc.policy.pool_settings import ClientProfile, RateLimitConfig
from router_svc.policy.router_request import Request
from router_svc.request_log import RequestLog
from router_svc.request_servicer import RequestServicer
from weft.api.common.v1 import receipt_pb2
from weft.api.router.v1 import request_service_pb2_grpc
from weft.dispatch.fleet import FleetView
from weft.kernel.channels.rpc import new_server
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.placement_request import PlacementRequest
from weft.kernel.requests.request_values import Operation, Priority
from weft.kernel.time.clock import SystemClock
from weft.kernel.values.units import Rate, RateUnit
from weft_app.cli import follow as follow_module
from weft_app.cli.follow import follow
from weft_app.cli.main import app
from weft_testing.fake_clock import FakeClock
from weft_testing.free_port import free_port

PROFILES = {"batch": ClientProfile(priority=Priority.LOW, route="drafts")}
BUSY = Considered(model="qwen-1", runner="atlas", score=0.25, gate="all 4 slots are busy")
FREE = Considered(model="qwen-2", runner="titan", score=0.75, chosen=True)


class Mesh:
    """A router's memory behind a socket, and the command line against it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.clock = SystemClock()
        self.log = RequestLog()
        self.figures_clock = FakeClock()
        self.figures = FiguresRecorder(self.figures_clock)
        self._loop: asyncio.AbstractEventLoop | None = None
        limits = RateLimitConfig(default=(Rate(50, 60, RateUnit.REQUESTS),))
        self.clients = ClientRegistry(ClientsConfig(profiles=PROFILES), limits, self.clock)

    def cancel(self, request_id: str, tenant: str, cancelled_by: str) -> dict[int, asyncio.Future[None]]:
        """Ends the requests under way with this id."""
        found, ends = self.log.under_way(100, tenant)[0], {}
        for entry in found:
            if entry.spec.request_id == request_id:
                entry.cancelled_by = cancelled_by
                self.log.note_end(ending(entry.key, self.clock.monotonic(), Reason.CANCELLED))
                ends[entry.key] = asyncio.get_running_loop().create_future()
                ends[entry.key].set_result(None)
        return ends

    def finish(self, key: int, reason: Reason) -> None:
        raise AssertionError(key, reason)

    def run(self, *arguments: str, **environment: str) -> Result:
        """A `weft` command to its end."""
        given = {"WEFT_HOME": str(self.home), "COLUMNS": "200", **environment}
        return CliRunner().invoke(app, arguments, env=given)

    def arrive(self, key: int, request_id: str, ago_seconds: float = 5.0, **fields: str) -> float:
        """A request that came a while ago; returns when, on the monotonic clock."""
        given = {"tenant": "default", "model": "qwen", **fields}
        request = PlacementRequest(request_id=request_id, operation=Operation.CHAT, **given)  # type: ignore[arg-type]
        at = self.clock.monotonic() - ago_seconds
        self.log.note_arrival(Request.of(key, request, at), datetime.now(UTC) - timedelta(seconds=ago_seconds))
        self.clients.admit(key, request)
        return at

    def soon(self, event: Callable[[], None]) -> None:
        """Something that happens on the router's own event loop."""
        assert self._loop is not None, "it is served"
        self._loop.call_soon_threadsafe(event)

    def gateway(self, router: str = "") -> AbstractContextManager[str]:
        """The gateway of the home; the registry is away. `router`: another one than what the mesh serves."""
        known = json.loads((self.home / "run" / "up.json").read_text())["grpc"]
        return home_gateway(self.home, f"127.0.0.1:{free_port()}", router or str(known))

    @contextmanager
    def serving(self) -> Iterator[None]:
        """On an event loop of its own: commands block theirs."""
        ready, over = threading.Event(), asyncio.Event()

        async def serve() -> None:
            server = new_server()
            loop: Any = self
            servicer = RequestServicer(self.log, self.clients, self.clock, loop, figures=self.figures)
            request_service_pb2_grpc.add_RequestServiceServicer_to_server(servicer, server)
            port = server.add_insecure_port("127.0.0.1:0")
            (self.home / "run").mkdir(parents=True)
            (self.home / "run" / "up.json").write_text(json.dumps({"grpc": f"127.0.0.1:{port}"}))
            await server.start()
            self._loop = asyncio.get_running_loop()
            ready.set()
            await over.wait()
            await server.stop(grace=None)

        thread = threading.Thread(target=asyncio.run, args=(serve(),))
        thread.start()
        assert ready.wait(10)
        try:
            yield
        finally:
            self.soon(over.set)
            thread.join(10)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    mesh = Mesh(tmp_path / "home")
    with mesh.serving(), mesh.gateway():
        yield mesh


def _served(mesh: Mesh) -> None:
    at = mesh.arrive(1, "req-1", 20.0, client_id="batch")
    mesh.log.note_decisions([Waits(key=1, position=2, reason="VRAM: needs 5.1 GiB", considered=(BUSY,))], at)
    wakes = Wakes(model="qwen-2", runner="titan", max_wait_seconds=60.0, why="its turn has come")
    mesh.log.note_decisions(
        [wakes, Loads(key=1, stage="waking qwen-2 on titan", progress=None, eta_seconds=8.0)], at + 1
    )
    candidate = Candidate(
        model="qwen-2",
        pool="qwen",
        runner="titan",
        incarnation="run-1",
        readiness=Readiness.READY,
        slots=4,
        operations=frozenset({Operation.CHAT}),
    )
    choice = Choice(candidate=candidate, policy="least_loaded", score=FREE.score, others=(BUSY,), count=40)
    mesh.log.note_decisions([Placed(key=1, candidate=candidate, attempt=1, choice=choice)], at + 9)
    receipt = receipt_pb2.Receipt(outcome=receipt_pb2.OUTCOME_COMPLETED, left_premises=True)
    receipt.attempts.add(runner="atlas", model="qwen-1", reason=Reason.CONNECT_FAILED.value)
    receipt.attempts.add(runner="titan", model="qwen-2")
    receipt.queue_wait.FromMilliseconds(1_000)
    receipt.load_wait.FromMilliseconds(8_000)
    receipt.time_to_first_token.FromMilliseconds(9_500)
    receipt.usage.prompt_tokens, receipt.usage.cached_prompt_tokens, receipt.usage.completion_tokens = 120, 64, 30
    mesh.log.note_end(ending(1, at + 12.5, Reason.UNSPECIFIED, receipt))
    mesh.clients.note_end(ending(1, receipt=receipt))


def test_explain_shows_the_full_history_of_a_request(mesh: Mesh) -> None:
    _served(mesh)
    found = mesh.run("explain", "req-1")
    assert found.exit_code == 0, found.output
    lines = found.stdout.splitlines()
    assert lines[0].split() == ["Request:", "req-1"]
    assert "Tenant:       default, client batch\nPriority:     normal" in found.stdout
    assert "completed after 12.5 s" in found.stdout
    decisions = [line.strip() for line in lines if line.strip().startswith("+")]
    assert decisions == [
        "+0.000 s  queued: VRAM: needs 5.1 GiB (position 2)",
        "+1.000 s  load started: qwen-2 on titan is loaded: its turn has come",
        "+1.000 s  loading: waking qwen-2 on titan, about 8 s",
        "+9.000 s  placed by least_loaded: attempt 1 sent to qwen-2 on titan",
    ]
    rows = [line.split() for line in lines if "0.75" in line or "0.25" in line]
    assert rows == [
        ["qwen-1", "atlas", "0.25", "all", "4", "slots", "are", "busy"],
        ["*", "qwen-2", "titan", "0.75", "-"],
        ["qwen-1", "atlas", "0.25", "all", "4", "slots", "are", "busy"],
    ]
    assert "and 38 more" in found.stdout
    assert [line.split(maxsplit=2)[2] for line in lines if "Attempt" in line] == [
        "qwen-1 on atlas: connect_failed",
        "qwen-2 on titan: answered",
    ]
    assert "1000 ms in the queue, 8000 ms for loads" in found.stdout
    assert "120 in (64 cached), 30 out" in found.stdout
    assert lines[-1].split() == ["Remote:", "yes"]


def test_captured_request_shows_the_command_for_its_content(mesh: Mesh) -> None:
    """The command had no id, and showed the content of the request that had ended last."""
    mesh.arrive(1, "req-1")
    receipt = receipt_pb2.Receipt(outcome=receipt_pb2.OUTCOME_COMPLETED, captured=True)
    mesh.log.note_end(ending(1, mesh.arrive(2, "req-2"), Reason.UNSPECIFIED, receipt))
    assert "yes; weft explain req-1 --content shows it" in mesh.run("explain", "req-1").stdout


def test_explain_of_a_waiting_request_shows_what_it_waits_for(mesh: Mesh) -> None:
    at = mesh.arrive(1, "req-1")
    mesh.log.note_decisions([Waits(key=1, position=2, reason="VRAM: needs 5.1 GiB", eta_seconds=9.0)], at)
    assert "queued at position 2: VRAM: needs 5.1 GiB, about 9 s" in mesh.run("explain", "req-1").stdout
    mesh.log.note_decisions([Loads(key=1, stage="qwen-2 loads on titan", progress=0.5)], at)
    assert "loading (50%): qwen-2 loads on titan" in mesh.run("explain", "req-1").stdout


def test_explain_of_a_rejected_request_shows_why(mesh: Mesh) -> None:
    at = mesh.arrive(1, "req-1")
    refusal = Rejects(key=1, reason=Reason.DEADLINE_UNREACHABLE, message="it would take 52 s, and has 30 s")
    mesh.log.note_decisions([refusal], at + 0.01)
    assert "deadline_unreachable after 10 ms: it would take 52 s, and has 30 s" in mesh.run("explain", "req-1").stdout


def test_failed_request_shows_the_error_engine_exit_and_last_log_lines(mesh: Mesh) -> None:
    died = "the engine died while it processed the request (signal SIGKILL)"
    mesh.arrive(1, "req-1")
    receipt = receipt_pb2.Receipt(outcome=receipt_pb2.OUTCOME_FAILED)
    receipt.time_to_first_token.FromMilliseconds(20)
    reason = Reason.SERVER_DIED.value
    receipt.attempts.add(
        runner="titan", model="qwen-1", reason=reason, message=died, engine_exit="signal SIGKILL", engine_log=["loaded"]
    )
    mesh.log.note_end(ending(1, mesh.clock.monotonic(), Reason.SERVER_DIED, receipt))
    explained = mesh.run("explain", "req-1").stdout
    assert f"qwen-1 on titan: server_died: {died}" in explained
    assert "Engine ended: signal SIGKILL" in explained
    assert explained.endswith("Engine log before attempt 1 failed\n  loaded\n")
    assert mesh.run("describe", "request", "req-1").stdout == explained
    assert mesh.run("describe", "request/req-1").stdout == explained
    assert mesh.run("describe", "request").exit_code == 2
    assert "the engine died" in mesh.run("get", "requests", "--state", "failed").stdout


def test_foreign_text_is_stripped_of_terminal_escapes(mesh: Mesh) -> None:
    at = mesh.arrive(1, "req-1")
    mesh.log.note_decisions([Waits(key=1, position=1, reason="\x1b[2J red", considered=(BUSY,))], at)
    assert "\x1b" not in mesh.run("explain", "req-1").stdout
    assert "\x1b" not in mesh.run("get", "requests").stdout


def test_get_requests_lists_running_ones_oldest_first(mesh: Mesh) -> None:
    at = mesh.arrive(1, "req-1", 5.0)
    mesh.log.note_decisions([Waits(key=1, position=4, reason="all 4 slots are busy", eta_seconds=7.0)], at)
    mesh.arrive(2, "req-2", 60.0, tenant="b", model="route/drafts", client_id="batch")
    mesh.arrive(3, "req-3")
    mesh.log.note_end(ending(3, mesh.clock.monotonic()))
    header, *rows = mesh.run("get", "requests").stdout.splitlines()
    assert " ".join(header.split()) == "REQUEST TARGET STATE TENANT PRIORITY POSITION ETA AGE WAITS FOR"
    assert [row.split()[:7] for row in rows] == [
        ["req-2", "route/drafts", "queued", "b", "normal", "-", "-"],
        ["req-1", "qwen", "queued", "default", "normal", "4", "7s"],
    ]
    assert rows[1].endswith("all 4 slots are busy")
    assert mesh.run("get", "requests", "-o", "name").stdout == "req-2\nreq-1\n"
    assert json.loads(mesh.run("get", "requests", "-o", "json").stdout)["total"] == 2
    assert "batch" in mesh.run("get", "requests", "-o", "wide").stdout
    assert mesh.run("get", "request", "req-3", "-o", "name").stdout == "req-3\n", "one by name, also after its end"


def test_get_requests_lists_ended_ones_by_outcome(mesh: Mesh) -> None:
    mesh.arrive(1, "req-1")
    mesh.log.note_end(ending(1, mesh.clock.monotonic(), Reason.UNSPECIFIED))
    mesh.arrive(2, "req-2")
    mesh.log.note_end(ending(2, mesh.clock.monotonic(), Reason.STALL_TIMEOUT))
    mesh.arrive(3, "req-3")
    header, *rows = mesh.run("get", "requests", "--state", "ended").stdout.splitlines()
    assert " ".join(header.split()) == "REQUEST TARGET OUTCOME TENANT PRIORITY TOKENS TOOK ENDED ERROR"
    assert [row.split()[:3] for row in rows] == [["req-2", "qwen", "stall_timeout"], ["req-1", "qwen", "completed"]]
    assert mesh.run("get", "requests", "--state", "failed", "-o", "name").stdout == "req-2\n"
    assert json.loads(mesh.run("get", "requests", "--state", "completed", "-o", "json").stdout)["total"] == 1


@pytest.mark.parametrize(
    "words",
    [
        ("requests", "--state", "nonsense"),
        ("requests", "req-1", "--state", "ended"),
        ("requests", "--state", "ended", "--state", "failed"),
        ("clients", "--state", "ended"),
        ("models", "--state", "ended"),
    ],
)
def test_unknown_request_state_is_rejected_and_error_names_the_option(mesh: Mesh, words: tuple[str, ...]) -> None:
    refused = mesh.run("get", *words)
    assert refused.exit_code == 2
    assert "--state: " in refused.stderr


def test_explain_without_an_id_uses_the_last_ended_request(mesh: Mesh) -> None:
    nothing = mesh.run("explain")
    assert nothing.exit_code == 3
    assert "no request has ended recently" in nothing.stderr
    for key in (1, 2):
        mesh.arrive(key, f"req-{key}")
    mesh.log.note_end(ending(2, mesh.clock.monotonic()))
    mesh.log.note_end(ending(1, mesh.clock.monotonic()))
    assert json.loads(mesh.run("explain", "-o", "json").stdout)["requestId"] == "req-1"


@pytest.mark.parametrize("arguments", [("requests", "-o", "yaml"), ("clients", "-o", "yaml")])
def test_unsupported_options_for_requests_and_clients_are_rejected(mesh: Mesh, arguments: tuple[str, ...]) -> None:
    assert mesh.run("get", *arguments).exit_code == 2


def test_tenants_are_listed_from_the_router_without_a_registry(mesh: Mesh) -> None:
    mesh.arrive(1, "req-1", tenant="acme")
    mesh.arrive(2, "req-2", tenant="other")
    found = mesh.run("get", "tenants", "-o", "wide")
    assert found.exit_code == 0
    header, *rows = found.stdout.splitlines()
    assert header.split() == ["TENANT", "LIMIT", "OF", "USED", "LEFT", "EMPTY", "IN"]
    assert [row.split()[0] for row in rows] == ["acme", "other"]
    assert found.stderr.startswith("weft: no registry answers: tenant declarations (weight, ")
    assert found.output == found.stdout + found.stderr, "the table is first"
    one = mesh.run("get", "tenants", "acme")
    assert [row.split()[0] for row in one.stdout.splitlines()[1:]] == ["acme"]
    # What is no table is read by programs, which must not take a part for the whole.
    assert mesh.run("get", "tenants", "-o", "json").exit_code == 1
    assert mesh.run("get", "models").exit_code == 1


def test_get_all_shows_tenant_limits_and_reports_what_is_missing_without_a_registry(mesh: Mesh) -> None:
    mesh.arrive(1, "req-1", tenant="acme")
    for words in (("all",), ("models,tenants",)):
        found = mesh.run("get", *words)
        assert found.exit_code == 1
        assert [row.split()[0] for row in found.stdout.splitlines()] == ["TENANT", "acme"]
        known, missing = found.stderr.splitlines()
        assert known.startswith("weft: no registry answers: tenant declarations ")
        assert missing.startswith("weft: not shown: models")
        assert ("runners" in missing) == (words == ("all",))
        assert "tenants" not in missing
    # No part is taken for the whole by programs, and labels are not known to a router.
    assert mesh.run("get", "all", "-o", "json").stdout == ""
    assert mesh.run("get", "all", "-l", "tier=fast").stdout == ""


def test_tenant_is_described_from_the_router_without_a_registry(mesh: Mesh) -> None:
    mesh.arrive(1, "req-1", tenant="acme")
    mesh.arrive(2, "req-2", tenant="other")
    for words in (("tenant", "acme"), ("tenant/acme",)):
        found = mesh.run("describe", *words)
        assert found.exit_code == 0
        name, title, header, row = found.stdout.splitlines()
        assert (name.split(), title) == (["Name:", "acme"], "Used:")
        assert (header.split()[0], row.split()[0]) == ("LIMIT", "50")
        assert found.stderr.startswith("weft: no registry answers: ")
    for unknown in (("tenant", "nobody"), ("model", "acme"), ("acme",), ("tenant", "acme", "-o", "json")):
        missing = mesh.run("describe", *unknown)
        assert (missing.exit_code, missing.stdout) == (1, "")
        assert "these are the limits that a router counts" not in missing.stderr, "none are shown"


def test_tenants_are_watched_from_the_router_without_a_registry(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh.arrive(1, "req-1", tenant="acme")
    readings = iter((lambda: mesh.arrive(2, "req-2", tenant="acme"), lambda: None))

    def wait() -> None:
        following = next(readings, None)
        if following is None:
            raise KeyboardInterrupt
        following()

    monkeypatch.setattr(follow_module, "wait_interval", wait)
    found = mesh.run("get", "tenants", "-w")
    assert found.exit_code == 0
    header, *rows = found.stdout.splitlines()
    assert header.split() == ["TENANT", "LIMIT", "OF", "USED", "LEFT", "EMPTY", "IN"]
    assert [row.split()[0] for row in rows] == ["acme", "acme"]
    assert "not waiting for the registry" in found.stderr


def test_registry_failure_is_shown_if_the_router_is_missing_too(tmp_path: Path) -> None:
    mesh, router = Mesh(tmp_path / "home"), free_port()
    with mesh.serving(), mesh.gateway(f"127.0.0.1:{router}"):
        for words in (("get", "tenants"), ("get", "all"), ("describe", "tenant", "acme"), ("get", "tenants", "-w")):
            found = mesh.run(*words)
            assert found.exit_code == 1
            assert ("the registry cannot be reached" in found.stderr, str(router) in found.stderr) == (True, False)


def test_request_is_cancelled_by_id_and_an_ended_one_reports_its_outcome(mesh: Mesh) -> None:
    mesh.arrive(1, "req-1")
    mesh.arrive(2, "a/b", tenant="acme")
    done = mesh.run("cancel", "request", "req-1")
    assert (done.exit_code, done.output) == (0, "request/req-1 cancelled by an operator on this machine\n")
    again = mesh.run("cancel", "request/req-1")
    assert (again.exit_code, again.output) == (0, "request/req-1 cancelled by an operator on this machine\n")
    slashed = mesh.run("cancel", "request/a/b", "--tenant", "acme")
    assert (slashed.exit_code, slashed.output) == (0, "request/a/b cancelled by an operator on this machine\n")
    mesh.arrive(3, "req-3")
    mesh.log.note_end(ending(3, mesh.clock.monotonic(), Reason.UNSPECIFIED))
    assert mesh.run("cancel", "request", "req-3").output == "request/req-3 had already completed\n"
    explained = mesh.run("explain", "req-1").output
    assert "cancelled by an operator on this machine" in explained
    mesh.arrive(4, "req-4")
    document = json.loads(mesh.run("cancel", "request", "req-4", "-o", "json").output)
    assert (document["requestId"], document["state"], document["cancelledBy"]) == ("req-4", "ended", "local")


def test_unknown_request_does_not_stop_the_other_cancellations(mesh: Mesh) -> None:
    mesh.arrive(1, "req-1")
    done = mesh.run("cancel", "requests", "nobody", "req-1")
    assert done.exit_code == 3
    assert "request/req-1 cancelled by an operator on this machine" in done.output
    assert "weft get requests" in done.output
    assert mesh.run("cancel", "request").exit_code == 2
    assert "must be request, task, batch or operation" in mesh.run("cancel", "model", "m").output
    assert "must be request, task, batch or operation" in mesh.run("cancel", "req-1", "task-1").output
    assert "--tenant: goes with requests" in mesh.run("cancel", "task-1", "--tenant", "acme").output


def _watched(mesh: Mesh, *arguments: str, events: Sequence[Callable[[], None]] = ()) -> list[str]:
    """The lines of a watch of requests: each event comes after the one before was seen; then Ctrl-C."""

    def until_interrupted(*asked: Any, **query: Any) -> Iterator[Any]:
        following = follow(*asked, **query)
        yield next(following)
        for event in events:
            mesh.soon(event)
            yield next(following)
        raise KeyboardInterrupt

    with patch("weft_app.cli.records.follow", until_interrupted):
        result = mesh.run("get", *arguments, "-w")
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def test_running_requests_are_followed_until_they_end(mesh: Mesh) -> None:
    at = mesh.arrive(1, "req-1")
    mesh.arrive(2, "req-2", tenant="acme")
    mesh.log.note_end(ending(2, at + 1))

    def waits() -> None:
        mesh.log.note_decisions([Waits(key=1, position=2, reason="VRAM: needs 5.1 GiB")], at + 1)

    def ends() -> None:
        mesh.log.note_end(ending(1, at + 5, Reason.UNSPECIFIED))

    def arrives() -> None:
        mesh.arrive(3, "req-3", tenant="acme")

    header, first, waiting, ended, new = _watched(mesh, "requests", events=(waits, ends, arrives))
    assert header.split()[:3] == ["REQUEST", "TARGET", "STATE"]
    assert [line.split()[:3] for line in (first, waiting, ended, new)] == [
        ["req-1", "qwen", "queued"],
        ["req-1", "qwen", "queued"],
        ["req-1", "qwen", "ended"],
        ["req-3", "qwen", "queued"],
    ]
    assert "VRAM: needs 5.1 GiB" in waiting


def test_ended_requests_are_followed_by_outcome(mesh: Mesh) -> None:
    at = [mesh.arrive(key, f"req-{key}") for key in range(1, 5)]
    mesh.log.note_end(ending(1, at[0] + 1, Reason.STALL_TIMEOUT))

    def end(key: int, reason: Reason) -> Callable[[], None]:
        return lambda: mesh.log.note_end(ending(key, at[key - 1] + 1, reason))

    events = (end(2, Reason.UNSPECIFIED), end(3, Reason.WORKER_LOST))
    assert _watched(mesh, "requests", "--state", "failed", "-o", "name", events=events) == ["req-1", "req-3"]


def test_named_request_is_refetched_with_its_decisions_when_it_changes(mesh: Mesh) -> None:
    at = mesh.arrive(1, "req-1")
    mesh.arrive(2, "req-2")

    def waits(key: int) -> Callable[[], None]:
        return lambda: mesh.log.note_decisions([Waits(key=key, position=1, reason="busy")], at + 1)

    lines = _watched(mesh, "requests", "req-1", "-o", "json", events=(waits(2), waits(1)))
    before, after = (json.loads(line) for line in lines)
    assert (before["decisions"], after["decisions"][0]["kind"]) == ([], "queued")


def test_last_hour_metrics_are_shown_as_table_and_document(mesh: Mesh) -> None:
    asked = PlacementRequest(request_id="r-1", tenant="a", model="qwen", operation=Operation.CHAT)
    receipt = receipt_pb2.Receipt(outcome=receipt_pb2.OUTCOME_COMPLETED)
    receipt.usage.prompt_tokens, receipt.usage.completion_tokens = 12, 34
    clock = mesh.figures_clock
    mesh.figures.note_end(ending(asked, clock.monotonic(), Reason.UNSPECIFIED, receipt, view=FleetView()))
    asyncio.run(clock.advance(10.0))
    table = mesh.run("mesh", "figures")
    document = json.loads(mesh.run("mesh", "figures", "-o", "json").stdout)
    assert table.exit_code == 0, table.output
    assert table.stdout.splitlines()[1].split()[:7] == ["unknown", "1", "0", "0", "0", "0", "12"]
    assert (document["kind"], sum(document["all"]["completionTokens"])) == ("figures", 34)
