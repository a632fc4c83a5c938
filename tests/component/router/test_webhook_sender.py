"""Events reach a real receiver, signed as OpenAI's package verifies them, whatever happens on the way."""

import asyncio
import json
import re
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from aiohttp import web
from kit.http_server import http_server
from kit.waiting import until

from router_svc.durable.tasks.sql_store import SqlTaskStore
from router_svc.durable.tasks.task_records import NewTask
from router_svc.durable.webhooks import request
from router_svc.durable.webhooks.outbox import Outbox
from router_svc.durable.webhooks.sender import WebhookSender
from router_svc.store.database import RouterDatabase
from weft.api.registry.v1.secret_service_pb2 import GetWebhookResponse
from weft.api.registry.v1.tenant_pb2 import Tenant, TenantManifest, Webhook
from weft.api.router.v1 import task_pb2
from weft.api.router.v1.webhook_pb2 import WebhookEvent
from weft.dispatch.fleet import FleetView
from weft.durable.responses import BACKGROUND_KIND
from weft.kernel.channels.outbound import Outbound
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority
from weft_testing.fake_clock import FakeClock
from weft_testing.free_port import free_port

ROOT = Path(__file__).resolve().parents[3]
SECRET = "whsec_" + b64encode(bytes(range(32))).decode()
Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


async def accept(_: web.BaseRequest) -> web.StreamResponse:
    return web.Response(status=204)


async def hang(_: web.BaseRequest) -> web.StreamResponse:
    await asyncio.sleep(60)
    return web.Response()


def status(code: int, **headers: str) -> Answer:
    async def answer(_: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=code, headers=headers, body=b"x" * 1_000_000)

    return answer


class Bench:
    """A router's tasks and sender, and a receiver for each tenant."""

    def __init__(self, file: Path) -> None:
        self.url = ""
        # Receivers compare times with their own clock.
        self.clock = FakeClock(utc=datetime.now(UTC))
        self.webhooks = {"ann": "/ann"}
        """Paths by tenant."""
        self.failure: WeftError | None = None
        """Of the registry."""
        self.answers: dict[str, list[Answer]] = {}
        """Next answers by path; then it accepts."""
        self.received: list[tuple[str, Mapping[str, str], bytes]] = []
        self.results: list[str] = []
        self.store = SqlTaskStore(RouterDatabase(file))
        self.outbox = self.store.outbox = Outbox(None)
        self.sender = self.new_sender()

    def new_sender(self, outbound: Outbound | None = None) -> WebhookSender:
        return WebhookSender(
            self.store._database,
            self.outbox,
            self.get_webhook,
            self.clock,
            utc_now=self.now,
            keep_seconds=604_800.0,
            observe=self.results.append,
            outbound=outbound or Outbound(own_listeners=lambda: ()),
        )

    def now(self) -> float:
        return self.clock.utc_now().timestamp()

    async def get_webhook(self, tenant: str) -> GetWebhookResponse:
        if self.failure is not None:
            raise self.failure
        path = self.webhooks.get(tenant)
        return GetWebhookResponse() if path is None else GetWebhookResponse(url=self.url + path, secret=SECRET)

    async def receive(self, got: web.BaseRequest) -> web.StreamResponse:
        self.received.append((got.path, dict(got.headers), await got.read()))
        answers = self.answers.get(got.path)
        return await (answers.pop(0) if answers else accept)(got)

    async def end(self, task_id: str, tenant: str = "ann", kind: str = "") -> None:
        """A task is submitted and cancelled."""
        task = task_pb2.Task(id=task_id, tenant=tenant, model="qwen", max_attempts=1, origin_kind=kind)
        new = NewTask(
            task=task,
            band=Priority.DURABLE,
            spec=b"",
            digest=b"",
            created_at=self.now(),
            pending_limit_seconds=60.0,
        )
        await self.store.submit(new)
        await self.store.cancel(tenant, task_id, self.now())

    async def event(self, task_id: str, tenant: str = "ann") -> WebhookEvent:
        details = await self.store.details(tenant, task_id)
        assert details is not None
        return details.webhook

    async def until(self, task_id: str, count: int, tenant: str = "ann") -> WebhookEvent:
        """The event once it has this number of attempts."""

        async def is_attempted() -> bool:
            return len((await self.event(task_id, tenant)).attempts) >= count

        await until(is_attempted)
        return await self.event(task_id, tenant)

    async def next_attempt(self, task_id: str) -> WebhookEvent:
        """Time passes until the next attempt has ended."""
        event = await self.event(task_id)
        # The sender sleeps until the attempt, and its sweeper.
        await self.clock.wait_for_sleepers(2)
        await self.clock.advance(event.next_time.seconds + 1 - self.now())
        return await self.until(task_id, len(event.attempts) + 1)


@asynccontextmanager
async def running(bench: Bench) -> AsyncIterator[Bench]:
    await bench.store.start()
    await bench.sender.start()
    try:
        yield bench
    finally:
        await bench.sender.stop(0)
        await bench.store.stop()


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path / "router.db")
    async with http_server(bench.receive) as bench.url, running(bench):
        yield bench


def failure_of(event: WebhookEvent) -> tuple[str, str]:
    error = event.attempts[-1].error
    return Reason(error.reason).name, error.message


async def test_openai_package_verifies_the_event_of_a_background_response(bench: Bench) -> None:
    await bench.end("task-0123456789abcdef01234567", kind=BACKGROUND_KIND)
    event = await bench.until("task-0123456789abcdef01234567", 1)
    ((_, headers, body),) = bench.received
    client = openai.OpenAI(api_key="none", webhook_secret=SECRET)
    found: Any = client.webhooks.unwrap(body, headers)
    assert (found.type, found.data.id) == ("response.cancelled", "resp_0123456789abcdef01234567")
    assert (found.id, found.object, found.created_at) == (event.id, "event", event.create_time.seconds)
    assert headers["webhook-id"] == "evt_0123456789abcdef01234567"
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(body + b" ", headers)
    assert event.state == WebhookEvent.STATE_DELIVERED
    assert bench.results == ["delivered"]


async def test_receiver_of_the_docs_verifies_an_event(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.+?)```", (ROOT / "docs" / "webhooks.md").read_text("utf-8"), re.DOTALL)
    port = free_port()
    once = f'with HTTPServer(("127.0.0.1", {port}), Receiver) as server: server.handle_request()'
    code = code.replace('HTTPServer(("", 8000), Receiver).serve_forever()', once).replace("whsec_...", SECRET)
    serving = asyncio.create_task(asyncio.to_thread(exec, code, {}))
    await until(lambda: any(each.laddr.port == port for each in psutil.Process().net_connections("tcp")))
    bench.url = f"http://127.0.0.1:{port}"
    await bench.end("task-1")
    await serving
    assert (await bench.until("task-1", 1)).state == WebhookEvent.STATE_DELIVERED
    assert "evt_1 task.cancelled task-1" in capsys.readouterr().out


async def test_receiver_that_fails_then_is_slow_then_accepts_gets_the_event_with_one_id(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "SEND_SECONDS", 0.2)
    bench.answers["/ann"] = [status(500), hang, status(302, Location="/elsewhere"), accept]
    await bench.end("task-1")
    failures = [failure_of(await bench.until("task-1", 1))]
    failures += [failure_of(await bench.next_attempt("task-1")) for _ in range(2)]
    event = await bench.next_attempt("task-1")
    assert failures == [
        ("BACKEND_ERROR", "the receiver answered with status 500"),
        ("HEADERS_TIMEOUT", "the receiver did not answer within 0.2 s"),
        ("BACKEND_ERROR", "the receiver answered with status 302"),
    ]
    assert (event.state, event.HasField("next_time")) == (WebhookEvent.STATE_DELIVERED, False)
    assert {headers["webhook-id"] for _, headers, _ in bench.received} == {"evt_1"}
    assert [path for path, _, _ in bench.received] == ["/ann"] * 4
    assert len({headers["webhook-timestamp"] for _, headers, _ in bench.received}) == 4
    assert bench.results == ["failed"] * 3 + ["delivered"]


async def test_event_is_given_up_after_a_day(bench: Bench) -> None:
    bench.answers["/ann"] = [status(503)] * 99
    await bench.end("task-1")
    event = await bench.until("task-1", 1)
    while event.state == WebhookEvent.STATE_WAITING:
        event = await bench.next_attempt("task-1")
    assert event.state == WebhookEvent.STATE_FAILED
    assert len(event.attempts) < 16
    assert bench.results[-1] == "given_up"


async def test_dead_receiver_of_one_tenant_does_not_delay_another(bench: Bench) -> None:
    bench.webhooks |= {"bob": "/bob"}
    bench.answers["/ann"] = [hang] * 20
    for number in range(20):
        await bench.end(f"task-{number}")
    await bench.end("task-99", "bob")
    await bench.until("task-99", 1, "bob")
    assert [path for path, _, _ in bench.received if path == "/ann"] == ["/ann"] * 4


async def test_address_of_the_mesh_itself_is_not_connected_to(bench: Bench) -> None:
    await bench.sender.stop(0)
    port = int(bench.url.rpartition(":")[2])
    bench.sender = bench.new_sender(Outbound(own_listeners=lambda: [("127.0.0.1", port)]))
    await bench.sender.start()
    await bench.end("task-1")
    reason, words = failure_of(await bench.until("task-1", 1))
    assert (reason, "is a port of the mesh itself" in words) == ("PERMISSION_DENIED", True)
    assert bench.received == []


async def test_registry_that_does_not_answer_fails_an_attempt(bench: Bench) -> None:
    bench.failure = WeftError(Reason.SERVICE_UNAVAILABLE, "the registry does not answer")
    await bench.end("task-1")
    assert failure_of(await bench.until("task-1", 1)) == ("SERVICE_UNAVAILABLE", "the registry does not answer")
    bench.failure = None
    assert (await bench.next_attempt("task-1")).state == WebhookEvent.STATE_DELIVERED


async def test_event_of_a_tenant_without_a_webhook_is_removed(bench: Bench) -> None:
    await bench.end("task-1", "bob")

    async def is_gone() -> bool:
        return not (await bench.event("task-1", "bob")).id

    await until(is_gone)
    assert (bench.received, bench.results) == ([], [])


async def test_event_outlives_a_sender_that_is_killed_before_it_sends(bench: Bench) -> None:
    bench.answers["/ann"] = [hang]
    await bench.end("task-1")
    await until(lambda: bench.received)
    # What a kill leaves: the event is on disk, and its attempt is not.
    await bench.sender.stop(0)
    bench.sender = bench.new_sender()
    await bench.sender.start()
    event = await bench.until("task-1", 1)
    assert event.state == WebhookEvent.STATE_DELIVERED
    assert [headers["webhook-id"] for _, headers, _ in bench.received] == ["evt_1", "evt_1"]


async def test_sender_learns_the_tenants_with_a_webhook_from_the_mesh(bench: Bench) -> None:
    hook = Webhook(url="https://receiver.example", secret_ref="secret/hooks")
    tenants = {
        "ann": Tenant(manifest=TenantManifest(name="ann", webhook=hook)),
        "bob": Tenant(manifest=TenantManifest(name="bob")),
    }
    bench.sender.mesh_changed(FleetView())
    assert bench.outbox.tenants is None
    bench.sender.mesh_changed(FleetView(revision=1, tenants=tenants))
    assert bench.outbox.tenants == {"ann"}


def test_signature_is_that_of_the_specification() -> None:
    # The example of https://github.com/standard-webhooks/standard-webhooks.
    headers = request.signed_headers(
        "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
        b'{"test": 2432232314}',
        1_614_265_330,
    )
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_body_is_an_event_in_openai_form() -> None:
    event = WebhookEvent(id="evt_1", type="batch.completed", object_id="batch-1")
    event.create_time.seconds = 1_700_000_000
    assert json.loads(request.body_of(event)) == {
        "id": "evt_1",
        "object": "event",
        "created_at": 1_700_000_000,
        "type": "batch.completed",
        "data": {"id": "batch-1"},
    }


def test_end_is_stored_also_if_the_loop_of_a_stopped_sender_is_closed(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "router.db")

    async def serve() -> None:
        async with running(bench):
            pass

    async def end() -> str:
        await bench.store.start()
        await bench.end("task-1")
        event = await bench.event("task-1")
        await bench.store.stop()
        return event.id

    asyncio.run(serve())
    assert asyncio.run(end()) == "evt_1"
