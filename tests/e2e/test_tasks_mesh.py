"""Durable tasks over a whole mesh, as people and programs use them: the command line, OpenAI's client, plain HTTP."""

import asyncio
import json
from pathlib import Path

import aiohttp
from mesh_process import POOL, MeshProcess, fake_runner, run_weft, running_mesh, write_config
from openai import AsyncOpenAI

SLOW = 20.0
"""Tokens per second."""
ENDLESS = "endless"


async def test_queued_task_waits_for_its_model_over_a_restart_and_a_running_one_keeps_its_attempts(
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
        code, _, err = await run_weft("mesh", "wait", "task", ran, "--for", "status=running", home=home)
        assert code == 0, err
    with_it = str(write_config(tmp_path, fake_runner("a"), fake_runner("b", pool=ENDLESS)))
    with running_mesh(home, "--config", with_it):
        for task in (away, ran):
            code, out, err = await run_weft("mesh", "wait", "task", task, "--timeout", "30s", home=home)
            assert (code, out) == (0, f"task/{task}: completed\n"), err
        _, said, _ = await run_weft("logs", f"task/{away}", home=home)
        _, described, _ = await run_weft("describe", "task", away, home=home)
        _, shown, _ = await run_weft("describe", "task", ran, "-o", "json", home=home)
    assert said.startswith("tok0")
    assert "  1. claimed" in described
    assert "completed" in described
    assert [each.get("error", {}).get("reason") for each in json.loads(shown)["attempts"]] == ["shutting_down", None]


async def test_openai_client_batch_completes_in_order(common_mesh: MeshProcess, tmp_path: Path) -> None:
    body = {"model": POOL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    request = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    requests = tmp_path / "requests.jsonl"
    requests.write_text("".join(json.dumps({"custom_id": f"line-{n}", **request}) + "\n" for n in range(12)))
    url = f"{common_mesh.url}/v1"
    async with AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client, asyncio.timeout(60):
        with requests.open("rb") as lines:
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
