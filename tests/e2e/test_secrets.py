"""Whatever is secret stays where it belongs: not in logs at any level, not in answers, not in lists of processes."""

import base64
import json
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
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


async def _said(mesh: MeshProcess, runner_url: str) -> dict[str, str]:
    """Everything that anybody can read without being the owner of these files."""
    said = {str(path): path.read_text() for path in (mesh.home / "logs").iterdir() if path.is_file()}
    said["console"] = (mesh.home.parent / f"{mesh.home.name}.out").read_text()
    said["processes"] = json.dumps([process.cmdline() for process in mesh.family()])
    paths = (
        "/metrics",
        "/v1/models",
        "/v1/admin/models",
        "/v1/admin/audit",
        "/v1/admin/operations",
        "/v1/admin/gpu-memory",
    )
    async with aiohttp.ClientSession() as http:
        for url in (*(mesh.url + path for path in paths), f"{runner_url}/metrics", f"{runner_url}/v1/capabilities"):
            async with http.get(url) as response:
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
        said = await _said(mesh, url)
        assert _found(said, {"plain": {PLAIN}}), "nothing was searched"
        assert _found(said, secrets) == []
        await eventually(answered, SECONDS, "the model does not wake")
        keys = _engine_keys(mesh)
        assert keys, "the engine has no key"
        assert _found(await _said(mesh, url), {"key of an engine": keys, **secrets}) == []
