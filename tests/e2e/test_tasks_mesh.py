"""Durable tasks over a whole mesh, as people and programs use them: the command line, OpenAI's client, plain HTTP."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import aiohttp
import openai
import pytest
from kit.demo_answers import WITHOUT_END
from mesh_process import POOL, MeshProcess, eventually, fake_runner, run_weft, running_mesh, write_config
from openai import AsyncOpenAI

SLOW = 20.0
"""Tokens per second."""
TIMED = "timed"
ENDLESS = "endless"


def batch_file(folder: Path, *bodies: Mapping[str, object], model: str = POOL) -> Path:
    """A file of chats."""
    path = folder / "requests.jsonl"
    lines = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": model, "messages": [{"role": "user", "content": "Hello"}], **body},
        }
        for number, body in enumerate(bodies)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """A mesh that no test stops: one runner repeats the question, one answers in a second, one never ends."""
    folder = tmp_path_factory.mktemp("mesh")
    runners = (
        fake_runner("a", echo=True),
        fake_runner("b", pool=TIMED, tokens_per_second=SLOW, answer_tokens=20),
        fake_runner("c", pool=ENDLESS, tokens_per_second=SLOW, answer_tokens=0),
    )
    limits = {"rate_limits": {"tenants": {"slow": ["2req/sec"]}}}
    with running_mesh(folder / "home", "--config", str(write_config(folder, *runners, router=limits))) as mesh:
        yield mesh


def client_of(mesh: MeshProcess) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="unused", max_retries=0)


async def test_over_a_restart_a_task_waits_for_its_model_and_one_that_ran_is_handed_back_at_no_attempt(
    tmp_path: Path,
) -> None:
    home, path = tmp_path / "home", "/api/v1/inference-tasks"
    body = {"model": ENDLESS, "max_attempts": 1, "body": {"messages": [{"role": "user", "content": "Count"}]}}
    endless = fake_runner("b", pool=ENDLESS, tokens_per_second=SLOW, answer_tokens=0)
    with running_mesh(home, "--config", str(write_config(tmp_path, endless, drain_seconds=0.5))) as mesh:
        code, out, err = await run_weft("chat", POOL, "--async", "-m", "Hello", home=home)
        assert (code, out) == (3, "")
        assert "--wait-for-model" in err
        code, out, err = await run_weft("chat", POOL, "--async", "--wait-for-model", "-m", "Hello", home=home)
        assert (code, out.count("\n")) == (0, 1), err
        away = out.strip()
        _, shown, _ = await run_weft("get", "tasks", "-o", "json", home=home)
        (pending,) = json.loads(shown)["items"]
        assert (pending["id"], pending["state"], pending["attempt"]) == (away, "pending", 0)
        async with aiohttp.ClientSession(mesh.url) as session, session.post(path, json=body) as answer:
            ran = (await answer.json())["id"]
        code, _, err = await run_weft("wait", "task", ran, "--for", "status=running", home=home)
        assert code == 0, err
    with_it = str(write_config(tmp_path, fake_runner("a"), fake_runner("b", pool=ENDLESS)))
    with running_mesh(home, "--config", with_it):
        for task in (away, ran):
            code, out, err = await run_weft("wait", "task", task, "--timeout", "30s", home=home)
            assert (code, out) == (0, f"task/{task}: completed\n"), err
        _, said, _ = await run_weft("logs", f"task/{away}", home=home)
        _, described, _ = await run_weft("describe", "task", away, home=home)
        _, shown, _ = await run_weft("describe", "task", ran, "-o", "json", home=home)
    assert said.startswith("tok0")
    assert "  1. claimed" in described
    assert "completed" in described
    assert [each.get("error", {}).get("reason") for each in json.loads(shown)["attempts"]] == ["shutting_down", None]


async def test_a_cancelled_task_leaves_its_engine(shared: MeshProcess) -> None:
    _, out, _ = await run_weft("chat", ENDLESS, "--async", "-m", "Count", home=shared.home)
    task_id = out.strip()
    async with await shared.backend("c") as backend:
        await backend.wait_for_state(lambda state: state.active_requests == 1)
        code, out, err = await run_weft("cancel", f"task/{task_id}", home=shared.home)
        assert (code, out) == (0, f"task/{task_id} cancelled\n"), err
        await backend.wait_for_state(lambda state: state.active_requests == 0)
    code, _, err = await run_weft("wait", "task", task_id, home=shared.home)
    assert code == 1


async def test_a_batch_of_the_openai_client_comes_back_whole_and_in_order(shared: MeshProcess, tmp_path: Path) -> None:
    async with client_of(shared) as client, asyncio.timeout(60):
        with batch_file(tmp_path, *({"max_tokens": 4 + number} for number in range(12))).open("rb") as lines:
            file = await client.files.create(file=lines, purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"of": "me"}
        )
        while batch.status not in {"completed", "failed", "expired", "cancelled"}:
            batch = await client.batches.retrieve(batch.id)
        assert batch.output_file_id is not None
        content = (await client.files.content(batch.output_file_id)).text
    assert batch.status == "completed"
    assert batch.error_file_id is None
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed) == (12, 12)
    answers = [json.loads(line) for line in content.splitlines()]
    assert [answer["custom_id"] for answer in answers] == [f"line-{number}" for number in range(12)]
    for answer in answers:
        assert answer["response"]["status_code"] == 200
        assert answer["response"]["body"]["object"] == "chat.completion"
        assert answer["response"]["body"]["choices"][0]["message"]["content"]


async def test_the_lines_that_fail_are_in_the_file_of_errors(shared: MeshProcess, tmp_path: Path) -> None:
    too_long = {"messages": [{"role": "user", "content": "word " * 100_000}]}
    file = batch_file(tmp_path, {}, too_long, {}, model=TIMED)
    code, out, err = await run_weft("batch", "submit", str(file), "--watch", home=shared.home)
    assert code == 1, err
    batch_id = out.strip()
    _, answers, _ = await run_weft("batch", "results", batch_id, home=shared.home)
    _, errors, _ = await run_weft("batch", "results", batch_id, "--errors", home=shared.home)
    assert [json.loads(line)["custom_id"] for line in answers.splitlines()] == ["line-0", "line-2"]
    (failed,) = map(json.loads, errors.splitlines())
    assert failed["custom_id"] == "line-1"
    assert "context_length_exceeded" in json.dumps(failed)


async def test_a_response_in_the_background_outlives_its_caller_and_its_stream_is_resumed(shared: MeshProcess) -> None:
    async with client_of(shared) as client, asyncio.timeout(60):
        stream = await client.responses.create(model=TIMED, input="Count", background=True, stream=True)
        seen = []
        async for event in stream:
            seen.append(event)
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        created = seen[0]
        assert created.type == "response.created"
        rest = await client.responses.retrieve(
            created.response.id, stream=True, starting_after=seen[-1].sequence_number
        )
        seen += [event async for event in rest]
        done = await client.responses.retrieve(created.response.id)
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert seen[-1].type == "response.completed"
    said = "".join(event.delta for event in seen if event.type == "response.output_text.delta")
    assert done.status == "completed"
    assert done.output_text == said
    assert done.background


async def test_a_caller_who_leaves_a_journaled_request_may_find_its_answer_later(shared: MeshProcess) -> None:
    body = {
        "model": TIMED,
        "messages": [{"role": "user", "content": "Count"}],
        "stream": True,
        "durable": "wait",
        "on_disconnect": "keep",
    }
    async with aiohttp.ClientSession(shared.url) as session:
        async with session.post("/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
            task_id = answer.headers["x-weft-task-id"]
            await answer.content.readuntil(b"tok1")
        code, out, err = await run_weft("wait", "task", task_id, "--timeout", "30s", home=shared.home)
        assert (code, out) == (0, f"task/{task_id}: completed\n"), err
        async with session.get(f"/api/v1/inference-tasks/{task_id}") as kept:
            task = await kept.json()
    assert task["state"] == "completed"
    assert task["result"]["choices"][0]["message"]["content"].startswith("tok0")


async def test_an_idempotent_submission_is_one_task_and_another_tenants_is_not_found(shared: MeshProcess) -> None:
    body = {"model": POOL, "body": {"messages": [{"role": "user", "content": "Hello"}]}}
    path, key = "/api/v1/inference-tasks", {"Idempotency-Key": "report-42"}
    async with aiohttp.ClientSession(shared.url) as session:
        async with session.post(path, json=body, headers=key) as first:
            made = await first.json()
        async with session.post(path, json=body, headers=key) as again:
            same = await again.json()
        async with session.post(path, json=body | {"max_attempts": 1}, headers=key) as other:
            conflict = other.status
        async with session.get(f"{path}/{made['id']}", headers={"X-Tenant-ID": "other"}) as foreign:
            hidden = foreign.status
    assert (first.status, again.status, conflict, hidden) == (202, 200, 409, 404)
    assert made["id"] == same["id"]


@pytest.mark.nightly("a real engine, again")
@pytest.mark.real
async def test_a_batch_runs_on_the_real_model(tmp_path: Path) -> None:
    home = tmp_path / "home"
    file = batch_file(tmp_path, *({"max_tokens": 8, **WITHOUT_END} for _ in range(3)), model="smollm2-135m")
    with running_mesh(home, "--port", "0") as mesh:
        code, out, err = await run_weft("batch", "submit", str(file), "--watch", home=home)
        assert code == 0, err
        _, answers, _ = await run_weft("batch", "results", out.strip(), home=home)
        async with client_of(mesh) as client:
            with pytest.raises(openai.NotFoundError):
                await client.with_options(default_headers={"X-Tenant-ID": "other"}).batches.retrieve(out.strip())
    bodies = [json.loads(line)["response"]["body"] for line in answers.splitlines()]
    assert len(bodies) == 3
    assert all(body["usage"]["completion_tokens"] == 8 for body in bodies)
    assert all(body["choices"][0]["message"]["content"].strip() for body in bodies)


async def test_tasks_of_a_tenant_wait_for_its_limit_and_none_of_them_fails(shared: MeshProcess) -> None:
    async with aiohttp.ClientSession(shared.url, headers={"X-Tenant-ID": "slow"}) as http:
        body = {"model": POOL, "body": {"messages": [{"role": "user", "content": "Hello"}]}}
        began, tasks = asyncio.get_running_loop().time(), []
        for _ in range(6):
            async with http.post("/api/v1/inference-tasks", json=body) as response:
                assert response.status == 202
                tasks.append((await response.json())["id"])

        async def ended() -> list[tuple[str, int]]:
            found = []
            for task in tasks:
                async with http.get(f"/api/v1/inference-tasks/{task}") as response:
                    shown = await response.json()
                    found.append((shown["state"], len(shown["attempts"])))
            return found if {state for state, _ in found} == {"completed"} else []

        found = await eventually(ended, 60.0, "the tasks are not completed")
        assert found == [("completed", 1)] * 6, "a refusal for the limit is no attempt"
        assert asyncio.get_running_loop().time() - began > 2, "two in any second"
