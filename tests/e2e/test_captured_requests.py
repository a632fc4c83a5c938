"""Capture over real processes: what a caller got is what is read later, and nothing else keeps its text."""

import json
from pathlib import Path
from typing import Any

import aiohttp
from apart_mesh import running_apart
from mesh_process import POOL, eventually, fake_runner, run_weft, write_config

PROMPT, MARKED, TASK = "canary-of-a-prompt", "canary-of-a-marked-prompt", "canary-of-a-task"
TENANT = {"X-Tenant-ID": "acme"}
SECONDS = 30.0


def _chat(prompt: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": 20}


def _streamed(text: str) -> str:
    """The text in a stream of a chat."""
    lines = (line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {"))
    choices = (choice for line in lines for choice in json.loads(line)["choices"])
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def test_captured_stream_and_task_are_read_as_sent_and_nothing_else_has_the_prompt(tmp_path: Path) -> None:
    config = write_config(tmp_path, fake_runner("a"), log={"level": "debug"})
    with running_apart(tmp_path, config) as mesh:

        async def content(request_id: str) -> dict[str, Any]:
            """What was captured of a request, once the registry has it."""

            async def found() -> str | None:
                code, out, _ = await run_weft("explain", request_id, "--content", "-o", "json", home=mesh.home)
                return out if code == 0 else None

            return dict(json.loads(await eventually(found, SECONDS, f"{request_id} is not captured")))

        (tmp_path / "tenant.yaml").write_text("kind: tenant\nname: acme\ncapture: true\n")
        await mesh.weft("apply", "--file", str(tmp_path / "tenant.yaml"))
        async with aiohttp.ClientSession(mesh.url, headers=TENANT) as http:

            async def sent(prompt: str, **headers: str) -> str | None:
                body = {"model": POOL, "stream": True, **_chat(prompt)}
                async with http.post("/v1/chat/completions", json=body, headers=headers) as answer:
                    return _streamed(await answer.text()) if answer.status == 200 else None

            async def is_known() -> bool:
                async with http.get("/v1/models") as answer:
                    return POOL in await answer.text()

            await eventually(is_known, SECONDS, "there is no model")
            text = await sent(PROMPT, **{"X-Request-Id": "req-kept"})
            await sent(MARKED, **{"X-Request-Id": "req-marked", "X-Cache-Mode": "none"})
            capture = await content("req-kept")
            on_disk = b"".join(path.read_bytes() for path in mesh.home.rglob("*") if path.is_file())
            async with http.post("/api/v1/inference-tasks", json={"model": POOL, "body": _chat(TASK)}) as answer:
                task = (await answer.json())["id"]
            assert (await content(task))["prompt"] == f"[user]\n{TASK}"
        assert (capture["prompt"], capture["answer"]) == (f"[user]\n{PROMPT}", text)
        assert text
        assert b"acme req-kept" in on_disk, "a negative control: what is not encrypted is found"
        assert PROMPT.encode() not in on_disk
        assert "Captured" in await mesh.weft("explain", "req-kept")
        assert "no" in (await mesh.weft("explain", "req-marked")).split("Captured")[1].splitlines()[0]
        code, _, error = await run_weft("explain", "req-marked", "--content", home=mesh.home)
        assert (code, "not stored" in error) == (3, True), error
        audited = await mesh.weft("mesh", "audit", "list")
    assert audited.count("capture.read") >= 2
    assert "capture.switch_requested" in audited
    assert PROMPT not in audited
