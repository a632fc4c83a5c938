"""Tenants of a mesh: declared while it runs, counted by its router, and told to callers in headers."""

import json
from collections.abc import Mapping
from pathlib import Path

import aiohttp
import pytest
from mesh_process import POOL, MeshProcess, eventually

EXAMPLE = Path(__file__).parents[2] / "examples" / "tenants" / "teams.yaml"


@pytest.fixture
def mesh(common_mesh: MeshProcess) -> MeshProcess:
    return common_mesh


async def ask(mesh: MeshProcess, tenant: str) -> tuple[int, Mapping[str, str]]:
    body = {"model": POOL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{mesh.url}/v1/chat/completions", json=body, headers={"X-Tenant-ID": tenant}) as response,
    ):
        await response.read()
        return response.status, response.headers


def told(headers: Mapping[str, str], unit: str) -> tuple[int, int]:
    return int(headers[f"x-ratelimit-limit-{unit}"]), int(headers[f"x-ratelimit-remaining-{unit}"])


async def until_limited(mesh: MeshProcess, tenant: str, limit: int) -> None:
    """Waits until the router has a limit, without a request that it would count."""

    async def known() -> bool:
        found = json.loads(await mesh.weft("describe", "tenant", tenant, "-o", "json"))
        return any(use["limit"] == limit for use in found["uses"])

    await eventually(known, 20, f"the router does not count by the limit {limit}")


async def test_example_tenants_apply_and_show_usage(mesh: MeshProcess) -> None:
    assert await mesh.weft("apply", "-f", str(EXAMPLE)) == "tenant/research created\ntenant/interns created\n"
    assert await mesh.weft("apply", "-f", str(EXAMPLE)) == "tenant/research unchanged\ntenant/interns unchanged\n"
    await until_limited(mesh, "interns", 20)
    status, headers = await ask(mesh, "interns")
    assert (status, told(headers, "requests")) == (200, (20, 19))
    limit, remaining = told(headers, "tokens")
    assert limit == 200_000
    assert 199_000 < remaining < 200_000
    table = await mesh.weft("get", "tenants")
    line = next(line for line in table.splitlines() if line.startswith("interns"))
    assert "20 req/min, 200000 tok/day per key, 30 req/hour per model for big-*" in line
    assert "1 of 20 req/min" in line
    assert "declared" in line
    assert "configured" in next(line for line in table.splitlines() if line.startswith("filed"))
    page = await mesh.weft("describe", "tenant", "interns")
    assert "Max in flight:" in page
    assert "200000 tok/day" in page
    assert "by an operator on this machine" in page, "calls without a key"
    await mesh.weft("delete", "tenant", "research", "interns")
