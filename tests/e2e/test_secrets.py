"""Whatever is secret stays where it belongs: not in logs at any level, not in answers, traces or lists of processes."""

import base64
import json
import resource
import sqlite3
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from indiscreet_server import indiscreet_runner
from kit.counting_provider import Reply, counting_provider
from kit.otlp_receiver import running_receiver
from mesh_process import COLD_WEFT, MeshProcess, eventually, fake_runner, run_weft, running_mesh, write_config
from test_runner_http import op_token

from weft_testing.free_port import free_port

KEY = b"canary-of-a-shared-key-0123456789"
PROMPT = "canary-of-a-prompt"
PLAIN = "m-a"
"""What is no secret and must be found: otherwise nothing was searched."""
SECONDS = 30.0


def _spellings(secret: bytes) -> set[str]:
    """How bytes may be written down."""
    found = {secret.hex(), base64.b64encode(secret).decode().rstrip("=")}
    found.add(base64.urlsafe_b64encode(secret).decode().rstrip("="))
    with suppress(UnicodeDecodeError):
        found.add(secret.decode("ascii"))
    return found


def _made_by_the_mesh(home: Path) -> dict[str, set[str]]:
    """What a running mesh keeps on its disk: session ids and the keys that tickets and permits are made with."""
    found: dict[str, set[str]] = {}
    with sqlite3.connect(f"file:{home}/state/registry.db?mode=ro", uri=True) as database:
        for session_id, key in database.execute("SELECT id, ticket_key FROM sessions"):
            found["session id"] = {session_id}
            found["ticket key"] = _spellings(key)
    database.close()
    return found


def _engine_keys(mesh: MeshProcess) -> set[str]:
    """The key of each engine, of this start."""
    return {
        value for process in mesh.family() for name, value in process.environ().items() if name.endswith("_API_KEY")
    } - {""}


PATHS = (
    "/metrics",
    "/v1/models",
    "/v1/admin/models",
    "/v1/admin/audit",
    "/v1/admin/operations",
    "/v1/admin/gpu-memory",
)


async def _said(mesh: MeshProcess, *urls: str, headers: Mapping[str, str] | None = None) -> dict[str, str]:
    """Everything that anybody can read without being the owner of these files. `urls`: in addition to the gateway's."""
    said = {str(path): path.read_text() for path in (mesh.home / "logs").iterdir() if path.is_file()}
    said["console"] = (mesh.home.parent / f"{mesh.home.name}.out").read_text()
    said["processes"] = json.dumps([process.cmdline() for process in mesh.family()])
    async with aiohttp.ClientSession() as http:
        for url in (*(mesh.url + path for path in PATHS), *urls):
            async with http.get(url, headers=headers) as response:
                assert response.status == 200, url
                said[url] = await response.text()
    for command in (("ps",), ("mesh", "audit", "list"), ("get", "runners"), ("get", "models"), ("logs", PLAIN)):
        code, out, error = await run_weft(*command, home=mesh.home)
        assert code == 0, error
        said[" ".join(command)] = out + error
    return said


def _found(said: dict[str, str], secrets: dict[str, set[str]]) -> list[str]:
    return sorted(
        f"{name} in {where}"
        for where, text in said.items()
        for name, spellings in secrets.items()
        if any(spelling in text for spelling in spellings)
    )


async def _ask(url: str, body: dict[str, Any], **headers: str) -> int:
    async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as response:
        await response.read()
        return response.status


async def test_debug_logs_answers_and_process_lists_contain_no_secret(tmp_path: Path) -> None:
    key_file, port = tmp_path / "model-api.key", free_port()
    key_file.write_bytes(KEY)
    signers = [{"id": "admin1"}, {"id": "admin2"}]
    governance = {"mode": "shared_key", "key_file": str(key_file), "signers": signers, "required_signers": 2}
    runner = {**fake_runner("a"), "http_port": port}
    config = write_config(tmp_path, runner, log={"level": "debug"}, registry={"governance": governance})
    url = f"http://127.0.0.1:{port}"
    with running_mesh(tmp_path / "home", "--config", str(config), weft=COLD_WEFT) as mesh:
        chat = {"model": PLAIN, "max_tokens": 3, "messages": [{"role": "user", "content": PROMPT}]}

        async def answered() -> bool:
            return await _ask(f"{url}/v1/chat/completions", chat) == 200

        await eventually(answered, SECONDS, "the model does not answer")
        good, bad = op_token(KEY), op_token(b"x" * 32)
        for token, status in ((bad, 403), (good, 200), (good, 403)):
            assert await _ask(f"{url}/v1/models/unload", {"modelId": PLAIN, "verifiedOpToken": token}) == status
        secrets = {
            "shared key": _spellings(KEY),
            "operation token": {good["signature"], bad["signature"]},
            "prompt": {PROMPT},
            **_made_by_the_mesh(mesh.home),
        }
        pages = (f"{url}/metrics", f"{url}/v1/capabilities")
        said = await _said(mesh, *pages)
        assert _found(said, {"plain": {PLAIN}}), "nothing was searched"
        assert _found(said, secrets) == []
        await eventually(answered, SECONDS, "the model does not wake")
        keys = _engine_keys(mesh)
        assert keys, "the engine has no key"
        assert _found(await _said(mesh, *pages), {"key of an engine": keys, **secrets}) == []


PROVIDER_KEY, CLOUD, SECRET = "sk-canary-of-a-provider-0123456789", "frontier", "provider-key"
WRONG_KEY = f"weft_{'w' * 12}_{'c0ffee' * 10}c0de"
ALLOWING_CORES = ("sh", "-c", 'ulimit -c unlimited; exec "$@"', "sh")


async def test_keys_and_prompts_are_in_no_log_error_trace_metric_command_line_or_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path, fake_runner("a"), log={"level": "debug"}, auth={"required": True})
    home, given = tmp_path / "home", {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 3}
    errors: list[str] = []

    async def weft(*arguments: str, stdin: str = "") -> str:
        code, out, error = await run_weft(*arguments, home=home, stdin=stdin.encode())
        assert code == 0, error
        return out.strip()

    with running_receiver() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "1")
        up = running_mesh(home, "--config", str(config), within=ALLOWING_CORES, weft=COLD_WEFT)
        with up as mesh:
            async with counting_provider() as provider:
                key = await weft("keys", "create", "--role", "admin", "-o", "name")

                async def ask(key: str = key, **body: Any) -> int:
                    bearer = {"Authorization": f"Bearer {key}"}
                    async with (
                        aiohttp.ClientSession(headers=bearer) as http,
                        http.post(f"{mesh.url}/v1/chat/completions", json=given | body) as response,
                    ):
                        if response.status != 200:
                            errors.append(await response.text())
                        return response.status

                async def serves(model: str) -> bool:
                    return await ask(model=model, allow_remote=model == CLOUD) == 200

                async def until_served(model: str) -> None:
                    try:
                        await eventually(lambda: serves(model), SECONDS, f"{model} does not answer")
                    except AssertionError as failure:
                        failure.add_note("\n".join(errors[:1] + errors[-1:]))
                        raise

                await weft("keys", "secret", "create", SECRET, "-", stdin=PROVIDER_KEY)
                await weft("models", "create", CLOUD, "--url", provider.base_url, "--api-key-ref", f"secret/{SECRET}")
                await until_served(PLAIN)
                await until_served(CLOUD)
                keys = _engine_keys(mesh)
                assert await ask(WRONG_KEY, model=PLAIN) == 401
                assert await ask(model=PLAIN, temperature="hot") == 400
                rejection = {"error": {"message": f"Incorrect API key provided: {PROVIDER_KEY}", "type": "invalid_key"}}
                provider.replies.append(Reply(status=401, body=json.dumps(rejection).encode()))
                assert await ask(model=CLOUD, allow_remote=True) >= 400
                async with await mesh.backend("a") as engine:
                    await engine.set_behaviour(crash_after_tokens=0)
                assert await ask(model=PLAIN) >= 500
                await until_served(PLAIN)
            keys |= _engine_keys(mesh)
            said = await _said(mesh, headers={"Authorization": f"Bearer {key}"})
            said["errors"] = "\n".join(errors)
            cores = {process.pid: process.rlimit(resource.RLIMIT_CORE)[0] for process in mesh.family()}
        said["traces"] = repr(collector.spans)
    assert _found({"traces": said["traces"]}, {"plain": {PLAIN}}), "no trace was searched"
    secrets = {
        "API key": {key, key.rpartition("_")[2]},
        "wrong key": {WRONG_KEY, WRONG_KEY.rpartition("_")[2]},
        "provider's key": _spellings(PROVIDER_KEY.encode()),
        "key of an engine": keys,
        "prompt": {PROMPT},
    }
    assert len(keys) == 2
    assert _found(said, secrets) == []
    assert set(cores.values()) == {0}, cores


async def test_prompts_in_words_of_engines_reach_no_one_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXAMPLE_API_KEY", PROVIDER_KEY)
    runners = [indiscreet_runner(mode) for mode in ("prints", "echoes")]
    config = write_config(tmp_path, *runners, log={"level": "debug"}, auth={"required": True})
    home, given = tmp_path / "home", {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 3}
    with running_mesh(home, "--config", str(config), weft=COLD_WEFT) as mesh:
        admin, owner, other = [
            (await mesh.weft("keys", "create", "--role", role, "--tenant", tenant, "-o", "name")).strip()
            for role, tenant in (("admin", "clinic"), ("user", "clinic"), ("user", "other"))
        ]

        async def ask(key: str, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[str, str]:
            headers = {"Authorization": f"Bearer {key}", "X-Request-Timeout-Seconds": "10"}
            async with (
                aiohttp.ClientSession(headers=headers) as http,
                http.request(method, mesh.url + path, json=body) as response,
            ):
                assert response.status != 401
                return await response.text(), response.headers.get("x-request-id", "")

        engines = [process for process in mesh.family() if "indiscreet_server" in str(process.cmdline())]
        assert engines
        assert PROVIDER_KEY not in str([process.environ() for process in engines]), "it is another runner's"
        seen: dict[str, str] = {}
        echoed, _ = await ask(owner, "POST", "/v1/chat/completions", given | {"model": "echoes"})
        assert PROMPT in echoed, "the words of an engine's error are its caller's"
        died, request = await ask(owner, "POST", "/v1/chat/completions", given | {"model": "prints"})
        hello = {"model": "prints", "messages": [{"role": "user", "content": "hello"}]}
        seen["answer to another tenant"], _ = await ask(other, "POST", "/v1/chat/completions", hello)
        paths = ("/api/v1/models", "/api/v1/models/prints", "/api/v1/events?limit=500", "/v1/requests?state=failed")
        for path in (*paths, "/api/v1/runners", *PATHS, f"/v1/requests/{request}"):
            for who, key in (("admin", admin), ("another tenant", other)):
                seen[f"{path} ({who})"], _ = await ask(key, "GET", path)
        assert PROMPT in await mesh.weft("logs", "prints"), "readers of the runner's log see what its engine printed"
        engine_words = seen.pop(f"/v1/requests/{request} (admin)")
    assert "out of memory" in died
    assert PROMPT in engine_words, "as do readers of the request's record who may see runners"
    seen |= {str(path): path.read_bytes().decode("latin-1") for path in home.rglob("*") if path.is_file()}
    seen["console"] = (tmp_path / "home.out").read_text()
    assert _found(seen, {"plain": {"prints"}}), "nothing was searched"
    assert _found(seen, {"prompt": {PROMPT}}) == []
