"""Tenants of a mesh: declared while it runs, counted by its router, and told to callers in headers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from mesh_process import POOL, MeshProcess, eventually, run_weft

EXAMPLE = Path(__file__).parents[2] / "examples" / "tenants" / "teams.yaml"


@pytest.fixture
def mesh(common_mesh: MeshProcess) -> MeshProcess:
    return common_mesh


async def weft(mesh: MeshProcess, *words: str, stdin: str = "") -> str:
    code, out, err = await run_weft(*words, home=mesh.home, stdin=stdin.encode() if stdin else None)
    assert code == 0, err
    return out


async def ask(mesh: MeshProcess, tenant: str, **fields: Any) -> tuple[int, Mapping[str, str], str]:
    body = {"model": POOL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **fields}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{mesh.url}/v1/chat/completions", json=body, headers={"X-Tenant-ID": tenant}) as response,
    ):
        return response.status, response.headers, await response.text()


def told(headers: Mapping[str, str], unit: str) -> tuple[int, int]:
    return int(headers[f"x-ratelimit-limit-{unit}"]), int(headers[f"x-ratelimit-remaining-{unit}"])


def tenant_of(requests: int, **more: Any) -> str:
    return json.dumps({"kind": "tenant", "name": "team", "limits": [{"window": "hour", "requests": requests}], **more})


async def until_limited(mesh: MeshProcess, tenant: str, limit: int) -> None:
    """Waits until the router has a limit, without a request that it would count."""

    async def known() -> bool:
        found = json.loads(await weft(mesh, "describe", "tenant", tenant, "-o", "json"))
        return any(use["limit"] == limit for use in found["uses"])

    await eventually(known, 20, f"the router does not count by the limit {limit}")


async def test_example_tenants_apply_and_show_usage(mesh: MeshProcess) -> None:
    assert await weft(mesh, "apply", "-f", str(EXAMPLE)) == "tenant/research created\ntenant/interns created\n"
    assert await weft(mesh, "apply", "-f", str(EXAMPLE)) == "tenant/research unchanged\ntenant/interns unchanged\n"
    await until_limited(mesh, "interns", 20)
    status, headers, _ = await ask(mesh, "interns")
    assert (status, told(headers, "requests")) == (200, (20, 19))
    limit, remaining = told(headers, "tokens")
    assert limit == 200_000
    assert 199_000 < remaining < 200_000
    table = await weft(mesh, "get", "tenants")
    line = next(line for line in table.splitlines() if line.startswith("interns"))
    assert "20 req/min, 200000 tok/day per key, 30 req/hour per model for big-*" in line
    assert "1 of 20 req/min" in line
    assert "declared" in line
    assert "configured" in next(line for line in table.splitlines() if line.startswith("filed"))
    page = await weft(mesh, "describe", "tenant", "interns")
    assert "Max in flight:" in page
    assert "200000 tok/day" in page
    assert "by an operator on this machine" in page, "calls without a key"
    await weft(mesh, "delete", "tenant", "research", "interns")


async def test_limit_is_shown_enforced_and_changed_without_a_restart(mesh: MeshProcess) -> None:
    await weft(mesh, "apply", "-f", "-", stdin=tenant_of(2))
    await until_limited(mesh, "team", 2)
    for left in (1, 0):
        status, headers, _ = await ask(mesh, "team")
        assert (status, told(headers, "requests")) == (200, (2, left))
    assert "x-ratelimit-limit-tokens" not in headers
    assert headers["x-ratelimit-reset-requests"].startswith(("59m", "60m", "1h"))
    status, headers, body = await ask(mesh, "team")
    assert (status, told(headers, "requests")) == (429, (2, 0))
    assert 3_000 < int(headers["retry-after"]) <= 3_600
    assert headers["x-should-retry"] == "false"
    error = json.loads(body)["error"]
    assert (error["code"], error["message"]) == ("rate_limit_exceeded", "Tenant team exceeded 2 req/hour")
    await weft(mesh, "apply", "-f", "-", stdin=tenant_of(3))
    await until_limited(mesh, "team", 3)
    status, headers, _ = await ask(mesh, "team", stream=True)
    assert (status, told(headers, "requests")) == (200, (3, 0)), "a stream says it, too, and what was counted stays"
    assert (await ask(mesh, "team"))[0] == 429
    assert await weft(mesh, "delete", "tenant", "team") == "tenant/team deleted\n"

    async def is_free() -> bool:
        return (await ask(mesh, "team"))[0] == 200

    await eventually(is_free, 20, "the limit outlives its document")
    assert "x-ratelimit-limit-requests" not in (await ask(mesh, "team"))[1]
