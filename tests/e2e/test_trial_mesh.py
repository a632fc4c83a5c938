"""A trial over real processes: requests of a captured tenant are answered again by the candidate, and judged."""

from pathlib import Path
from typing import Any

import aiohttp
import yaml
from apart_mesh import running_apart
from mesh_process import eventually, fake_runner, running_mesh, write_config

SECONDS = 30.0
DOCUMENTS = (
    {"kind": "tenant", "name": "acme", "capture": True},
    {"kind": "alias", "name": "chat", "target": "m-a"},
    {
        "kind": "trial",
        "name": "t",
        "candidate": "m-b",
        "against": "m-a",
        "tenant": "acme",
        "sharePercent": 100,
        "maxPairs": 2,
    },
)


def _chat(model: str, prompt: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": 20, **more}


async def test_chats_of_a_captured_tenant_are_answered_by_the_candidate_and_judged(tmp_path: Path) -> None:
    runner, other = fake_runner("a", pool="old"), fake_runner("b", pool="new")
    config = write_config(tmp_path, runner | {"models": [*runner["models"], *other["models"]]})
    with running_apart(tmp_path, config) as mesh:
        (tmp_path / "trial.yaml").write_text(yaml.safe_dump_all(DOCUMENTS))

        async def is_declared() -> bool:
            models = await mesh.weft("get", "models", "-o", "name")
            return "m-a" in models and "m-b" in models

        await eventually(is_declared, SECONDS, "there are no models")
        await mesh.weft("apply", "--file", str(tmp_path / "trial.yaml"))
        async with aiohttp.ClientSession(mesh.url) as http:

            async def ask(request_id: str, body: dict[str, Any], tenant: str = "acme", **headers: str) -> int:
                headers |= {"X-Request-Id": request_id, "X-Tenant-ID": tenant}
                async with http.post("/v1/chat/completions", json=body, headers=headers) as answer:
                    await answer.read()
                    return answer.status

            async def report() -> dict[str, Any]:
                async with http.get("/v1/trials/t") as answer:
                    return dict(await answer.json())

            async def has(count: int, state: str) -> dict[str, Any] | None:
                found = await report()
                return found if len([each for each in found["pairs"] if each["state"] == state]) == count else None

            async def is_known() -> bool:
                return await ask("req-try", _chat("chat", "hi"), "other") == 200 and "pairs" in await report()

            await eventually(is_known, SECONDS, "the gateway has no alias and no trial")
            assert await ask("req-none", _chat("chat", "hi"), **{"X-Cache-Mode": "none"}) == 200
            assert await ask("req-other", _chat("m-b", "hi")) == 200
            assert await ask("req-two", _chat("chat", "hi", n=2)) in (200, 400)
            assert await ask("req-one", _chat("chat", "hi")) == 200
            await eventually(lambda: has(1, "answered"), SECONDS, "no pair is answered")
            assert await ask("req-stream", _chat("m-a", "hello", stream=True)) == 200
            found = await eventually(lambda: has(2, "answered"), SECONDS, "the second pair is not answered")
            assert [each["requestId"] for each in found["pairs"]] == ["req-stream", "req-one"]
            assert "has its 2 pairs" in found["stopped"]
            assert found["pairs"][0]["checks"]["lengthRatio"] > 0
            path = f"/v1/trials/t/pairs/{found['pairs'][0]['task']}"
            async with http.get(path) as answer:
                shown = await answer.json()
            assert (shown["prompt"], bool(shown["a"]["text"]), "aBy" in shown) == ("[user]\nhello", True, False)
            async with http.post(f"{path}/verdict", json={"verdict": "a"}) as answer:
                judged = await answer.json()
            assert judged["aBy"] in ("m-a", "m-b")
            assert judged["verdict"] == {"m-b": "candidate", "m-a": "against"}[judged["aBy"]]
            task = found["pairs"][0]["task"]
            async with http.get(f"/api/v1/inference-tasks/{task}", headers={"X-Tenant-ID": "acme"}) as answer:
                pair = await answer.json()
            assert (pair["model"], pair["metadata"]["weft-request"]) == ("m-b", "req-stream")


async def test_mesh_with_a_stored_trial_starts_without_its_extension_and_says_so(tmp_path: Path) -> None:
    runners = fake_runner("a"), fake_runner("b")
    with running_mesh(tmp_path / "home", "--config", str(write_config(tmp_path, *runners))) as mesh:
        await mesh.weft("apply", "-f", "-", stdin=yaml.safe_dump_all(DOCUMENTS))
        assert "trial/t" in await mesh.weft("get", "all", "-o", "name")
    config = write_config(tmp_path, *runners, extensions={"disabled": ["trials"]})
    with running_mesh(tmp_path / "home", "--config", str(config)) as mesh:
        said = (tmp_path / "home.out").read_text()
        assert "the kind trial belongs to the extension trials, which is off" in said
        assert "Stored and not used: trial/t" in said
        # These commands have no weft.yaml here: they learn it from the mesh.
        for form in ("name", "table"):
            shown = await mesh.weft("get", "all", "-o", form)
            assert ("m-a" in shown, "trial" in shown) == (True, False)
        async with aiohttp.ClientSession(mesh.url) as http:
            for path in ("/v1/trials/t", "/api/v1/trials"):
                async with http.get(path) as answer:
                    assert answer.status == 404
            headers = {"X-Tenant-ID": "acme"}
            async with http.post("/v1/chat/completions", json=_chat("chat", "hi"), headers=headers) as answer:
                assert answer.status == 200
        assert await mesh.weft("get", "tasks", "-o", "name") == ""
