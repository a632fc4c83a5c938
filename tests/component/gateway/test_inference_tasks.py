"""`/api/v1/inference-tasks`: submit, list, read, watch, cancel and delete over HTTP."""

import asyncio
import json
from dataclasses import replace
from typing import Any

from gateway_script import RawResponse, RunningGateway, delta, finished, serving, started
from task_script import ScriptedTasks, output
from test_gateway_media import CONFIG, PICTURE, URL, ScriptedMedia

from gateway.gateway_config import GatewayConfig, RateLimitConfig
from weft.api.common.v1 import completion_pb2
from weft.api.common.v1.priority_pb2 import PRIORITY_HIGH, PRIORITY_UNSPECIFIED
from weft.api.router.v1 import task_pb2, task_service_pb2
from weft.durable.tasks import event_number
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.units import Rate

PATH = "/api/v1/inference-tasks"
HI = [{"role": "user", "content": "hi"}]
CHAT = {"body": {"model": "tiny", "messages": HI}}


async def submit(gateway: RunningGateway, body: object = None, **headers: str) -> RawResponse:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await gateway.request("POST", PATH, CHAT if body is None else body, named)


async def get(gateway: RunningGateway, path: str = "", **headers: str) -> Any:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = await gateway.request("GET", PATH + path, headers=named)
    assert answer.status == 200, answer.body
    return answer.json


async def test_request_is_accepted_immediately_with_the_spec_of_the_live_route() -> None:
    tasks = ScriptedTasks()
    async with serving(tasks=tasks) as gateway:
        answer = await submit(gateway, X_Tenant_ID="ann", X_Cache_Tag="mine", X_Client_Id="ci")
        assert answer.status == 202
        task = answer.json
        assert answer.headers["location"] == f"{PATH}/{task['id']}"
        assert answer.headers["x-weft-task-id"] == task["id"]
        assert (task["state"], task["model"], task["endpoint"]) == ("pending", "tiny", "/v1/chat/completions")
        assert (task["created_at"], task["expires_at"]) == ("2026-03-01T12:00:00.000Z", "2026-03-01T13:00:00.000Z")
        assert (task["waiting_for"], task["error"], task["started_at"]) == ("no runner has the model", None, None)
        await gateway.request("POST", "/v1/chat/completions", CHAT["body"])
        new = tasks.one.new
        assert new.spec.chat == gateway.dispatcher.payloads[0]
        assert (new.tenant, new.spec.options.priority) == ("ann", PRIORITY_UNSPECIFIED)
        assert (new.spec.options.cache_tag, new.spec.options.client_id) == ("mine", "ci")
        assert json.loads(new.spec.origin) == CHAT["body"]
        assert not new.spec.HasField("pending_limit")


async def test_submission_options_are_applied() -> None:
    tasks = ScriptedTasks()
    async with serving(tasks=tasks) as gateway:
        body = {
            "model": "later",
            "endpoint": "/v1/completions",
            "body": {"prompt": "hi", "stream": True, "durable": "wait"},
            "pending_limit_seconds": 90,
            "max_attempts": 2,
            "wait_for_model": True,
        }
        assert (await submit(gateway, body, X_Priority="high")).status == 202
        spec = tasks.one.new.spec
        assert spec.wait_for_model
        assert (spec.model, spec.completion.prompts[0].text) == ("later", "hi")
        assert (spec.pending_limit.ToSeconds(), spec.max_attempts, spec.options.priority) == (90, 2, PRIORITY_HIGH)


async def test_same_key_returns_the_same_task_and_another_body_is_a_conflict() -> None:
    tasks = ScriptedTasks()
    async with serving(tasks=tasks) as gateway:
        first = await submit(gateway, Idempotency_Key="k 1")
        again = await submit(gateway, Idempotency_Key="k 1")
        assert (first.status, again.status) == (202, 200)
        assert first.json["id"] == again.json["id"]
        other = await submit(gateway, {"body": {"model": "other", "messages": HI}}, Idempotency_Key="k 1")
        assert other.refusal[:2] == (409, "idempotency_conflict")
        assert (await submit(gateway, Idempotency_Key="k 1", X_Tenant_ID="bob")).status == 202
        assert len(tasks.kept) == 2


async def test_invalid_key_is_rejected() -> None:
    async with serving(tasks=ScriptedTasks()) as gateway:
        for key in ("", "x" * 256, "a\tb", "h\xe9"):
            assert (await submit(gateway, Idempotency_Key=key)).refusal == (400, "invalid_argument", "Idempotency-Key")


async def test_request_the_live_route_rejects_is_rejected_here_with_its_field_path() -> None:
    tasks = ScriptedTasks()
    async with serving(tasks=tasks) as gateway:
        for body, param in (
            ({}, "body"),
            ({"body": {"messages": HI}}, "body.model"),
            ({"body": {"model": "tiny"}}, "body.messages"),
            ({"body": {"model": "tiny", "messages": [{"role": "nobody"}]}}, "body.messages[0].role"),
            ({"body": {"model": "tiny", "messages": HI, "n": 99}}, "body.n"),
            ({"body": {"model": "tiny", "messages": HI, "user": "u" * 600}}, "body.user"),
            ({"body": {"model": "a b", "messages": HI}}, "body.model"),
            ({"model": "other", "body": {"model": "tiny", "messages": HI}}, "model"),
            ({**CHAT, "endpoint": 1}, "endpoint"),
            ({**CHAT, "pending_limit_seconds": 0.5}, "pending_limit_seconds"),
            ({**CHAT, "pending_limit_seconds": 604_801}, "pending_limit_seconds"),
            ({**CHAT, "max_attempts": 101}, "max_attempts"),
        ):
            assert (await submit(gateway, body)).refusal == (400, "invalid_argument", param)
            assert tasks.kept == {}


async def test_half_a_surrogate_pair_is_replaced_as_by_the_live_route() -> None:
    tasks = ScriptedTasks()
    async with serving(tasks=tasks) as gateway:
        answer = await submit(
            gateway, {"body": {"model": "tiny", "messages": [{"role": "user", "content": "cut \ud83d"}]}}
        )
    assert answer.status == 202, answer.body
    assert tasks.one.new.spec.chat.messages[0].content[0].text == "cut \ufffd"


async def test_submissions_count_as_requests_of_their_tenant() -> None:
    config = GatewayConfig(port=0, rate_limits=RateLimitConfig(default=Rate(1, 60)))
    async with serving(tasks=ScriptedTasks(), config=config) as gateway:
        assert (await submit(gateway, {})).refusal[0] == 400
        assert (await submit(gateway)).status == 202
        assert (await submit(gateway)).refusal[:2] == (429, "rate_limit_exceeded")


async def test_task_submitted_elsewhere_is_rendered_by_its_operation() -> None:
    tasks = ScriptedTasks(at_once=[output([started()], [delta("Hi", finish="STOP"), finished()])])
    payload = completion_pb2.CompletionPayload(prompts=[completion_pb2.PromptInput(text="a")])
    for kind in ("", "completions"):
        spec = task_pb2.TaskSpec(model="tiny", completion=payload, origin=b"not json", origin_kind=kind)
        task_id = (await tasks.submit("default", task_service_pb2.SubmitTaskRequest(spec=spec))).task.id
        async with serving(tasks=tasks) as gateway:
            found = await get(gateway, f"/{task_id}")
            assert (found["result"]["object"], found["result"]["choices"][0]["text"]) == ("text_completion", "Hi")


async def test_result_warns_of_what_the_conversation_lost_as_the_live_route_does() -> None:
    tasks = ScriptedTasks(at_once=[output([started()], [delta("Hi", finish="STOP"), finished()])])
    unanswered = {"role": "tool", "tool_call_id": "gone", "content": "sunny"}
    messages = [unanswered, {"role": "assistant", "content": "Ok."}, *HI]
    body = {"model": "tiny", "messages": messages, "tools": [{"type": "custom"}]}
    async with serving(tasks=tasks) as gateway:
        task_id = (await submit(gateway, {"body": body})).json["id"]
        found = (await get(gateway, f"/{task_id}"))["result"]["warnings"]
        assert [warning["field"] for warning in found] == ["messages[0].tool_call_id", "tools[0]"]


async def test_unrenderable_answer_is_an_error_next_to_the_state_and_an_outage_is_a_503() -> None:
    tasks = ScriptedTasks(at_once=[output([started()])])
    async with serving(tasks=tasks) as gateway:
        task_id = json.loads((await submit(gateway)).body)["id"]
        found = await get(gateway, f"/{task_id}")
        assert (found["state"], found["error"]["code"]) == ("completed", "backend_protocol_error")
        assert "result" not in found
        tasks.watch_failures = [WeftError(Reason.SERVICE_UNAVAILABLE, "away")]
        answer = await gateway.request("GET", f"{PATH}/{task_id}")
        assert answer.refusal[:2] == (503, "service_unavailable")


async def test_submitted_request_is_returned_only_to_its_submitter() -> None:
    tasks = ScriptedTasks()
    async with serving(tasks=tasks) as gateway:
        task_id = json.loads((await submit(gateway)).body)["id"]
        tasks.one.task.caller = "local"
        assert (await get(gateway, f"/{task_id}?body=true"))["body"] == CHAT["body"]
        assert "body" not in await get(gateway, f"/{task_id}")
        tasks.one.task.caller = "key:another"
        assert "body" not in await get(gateway, f"/{task_id}?body=true")


async def test_tasks_are_listed_newest_first_by_state_and_model_in_pages() -> None:
    tasks = ScriptedTasks()
    async with serving(tasks=tasks) as gateway:
        ids = [json.loads((await submit(gateway)).body)["id"] for _ in range(3)]
        await gateway.request("POST", f"{PATH}/{ids[1]}/cancel")
        assert [task["id"] for task in (await get(gateway))["data"]] == ids[::-1]
        page = await get(gateway, "?limit=2")
        assert [task["id"] for task in page["data"]] == [ids[2], ids[1]]
        rest = await get(gateway, f"?limit=2&page_token={page['next_page_token']}")
        assert ([task["id"] for task in rest["data"]], rest["next_page_token"]) == ([ids[0]], None)
        assert [task["id"] for task in (await get(gateway, "?state=cancelled,failed"))["data"]] == [ids[1]]
        assert (await get(gateway, "?model=other"))["data"] == []
        assert "result" not in page["data"][0]


async def test_list_includes_the_notice_of_the_task_store() -> None:
    tasks = ScriptedTasks()
    async with serving(tasks=tasks) as gateway:
        assert "notice" not in await get(gateway)
        tasks.notice = "acknowledged work is missing"
        assert (await get(gateway))["notice"] == "acknowledged work is missing"


async def test_every_call_on_a_task_of_another_tenant_returns_404() -> None:
    tasks = ScriptedTasks()
    async with serving(tasks=tasks) as gateway:
        task_id = json.loads((await submit(gateway, X_Tenant_ID="ann")).body)["id"]
        assert (await get(gateway, X_Tenant_ID="bob"))["data"] == []
        for method, path in (
            ("GET", ""),
            ("GET", "/events"),
            ("POST", "/cancel"),
            ("DELETE", ""),
            ("DELETE", "?forget=true"),
        ):
            answer = await gateway.request(method, f"{PATH}/{task_id}{path}", headers={"X-Tenant-ID": "bob"})
            assert answer.refusal[:2] == (404, "not_found")
        assert tasks.one.task.state == task_pb2.TASK_STATE_PENDING


async def test_cancel_is_idempotent_and_delete_requires_an_ended_task() -> None:
    tasks = ScriptedTasks()
    async with serving(tasks=tasks) as gateway:
        task_id = json.loads((await submit(gateway)).body)["id"]
        answer = await gateway.request("DELETE", f"{PATH}/{task_id}?forget=true")
        assert answer.refusal[:2] == (409, "resource_in_use")
        for method, path in (("DELETE", ""), ("DELETE", ""), ("POST", "/cancel")):
            answer = await gateway.request(method, f"{PATH}/{task_id}{path}")
            assert (answer.status, answer.json["state"]) == (200, "cancelled")
        assert tasks.cancelled == [task_id]
        assert (await gateway.request("DELETE", f"{PATH}/{task_id}?forget=true")).status == 204
        assert (await gateway.request("GET", f"{PATH}/{task_id}")).refusal[:2] == (404, "not_found")


def events_of(raw: bytes) -> list[tuple[str, int, Any]]:
    found = []
    for block in raw.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            found.append((fields["event"], int(fields["id"]), json.loads(fields["data"])))
    return found


async def test_task_is_watched_to_its_end_and_resumable_from_any_event() -> None:
    tasks = ScriptedTasks()
    async with serving(tasks=tasks) as gateway:
        task_id = json.loads((await submit(gateway)).body)["id"]
        watching = asyncio.create_task(gateway.request("GET", f"{PATH}/{task_id}/events"))
        await tasks.was_watched.wait()
        tasks.begin()
        tasks.say(output([started()], [delta("Hello")]))
        tasks.say(output([delta(finish="STOP"), finished()]))
        tasks.complete()
        answer = await watching
        assert answer.headers["content-type"].startswith("text/event-stream")
        found = events_of(answer.body)
        first, last = event_number(1, 2), event_number(1, 4)
        assert [(name, number) for name, number, _ in found if name == "output"] == [
            ("output", first),
            ("output", last),
        ]
        assert found[0][0::2][0] == "task"
        assert (found[0][2]["state"], found[-1][2]["state"], found[-1][1]) == ("pending", "completed", last)
        told = next(body for name, _, body in found if name == "output")
        assert (told["attempt"], told["events"][1]) == (1, {"delta": {"text": "Hello"}})
        for path, headers in ((f"?after={first}", {}), ("?after=0", {"Last-Event-ID": str(first)})):
            rest = events_of((await gateway.request("GET", f"{PATH}/{task_id}/events{path}", headers=headers)).body)
            assert [(name, number) for name, number, _ in rest] == [("task", first), ("output", last), ("task", last)]


async def test_watch_that_fails_before_its_first_event_is_a_status() -> None:
    tasks = ScriptedTasks()
    async with serving(tasks=tasks) as gateway:
        assert (await gateway.request("GET", f"{PATH}/task-1/events")).refusal[:2] == (404, "not_found")
        tasks.failure = WeftError(Reason.SERVICE_UNAVAILABLE, "the database is locked")
        assert (await submit(gateway)).refusal[:2] == (503, "service_unavailable")


async def test_images_are_stored_in_the_task_before_it_is_accepted() -> None:
    media = ScriptedMedia()
    media.may_answer.set()
    tasks = ScriptedTasks()
    content = [{"type": "image_url", "image_url": {"url": URL}}]
    async with serving(tasks=tasks, media=media, config=CONFIG) as gateway:
        body = {"body": {"model": "tiny", "messages": [{"role": "user", "content": content}]}}
        assert (await submit(gateway, body)).status == 202
        assert tasks.one.new.spec.chat.messages[0].content[0].image.data == PICTURE


async def test_rate_limited_tenant_triggers_no_fetch() -> None:
    media, content = ScriptedMedia(), [{"type": "image_url", "image_url": {"url": URL}}]
    config = replace(CONFIG, rate_limits=RateLimitConfig(default=Rate(1, 60)))
    async with serving(tasks=ScriptedTasks(), media=media, config=config) as gateway:
        assert (await submit(gateway)).status == 202
        body = {"body": {"model": "tiny", "messages": [{"role": "user", "content": content}]}}
        assert (await submit(gateway, body)).refusal[:2] == (429, "rate_limit_exceeded")
        assert media.asked == []
