"""Web search in a whole mesh: the configuration, the request's record, and `weft explain`."""

from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kit.http_server import http_server
from mesh_process import eventually, fake_runner, running_mesh, write_config
from search_stage import SEARCH, FakeSearXng

pytestmark = pytest.mark.slow("a whole mesh")

ASKED = [{"role": "user", "content": "Perform a web search for the query: weft mesh"}]


async def test_search_of_a_mesh_is_in_the_record_and_a_tenant_without_permit_gets_none(tmp_path: Path) -> None:
    service = FakeSearXng()
    async with http_server(service) as url:
        config = write_config(
            tmp_path,
            fake_runner("a"),
            gateway={"web_search": {"url": url}},
            router={"tenants": {"house": {"allow_remote": "never"}}},
        )
        with running_mesh(tmp_path / "home", "--config", str(config)) as mesh:
            async with aiohttp.ClientSession(mesh.url) as http:

                async def searched(tenant: str) -> tuple[Any, str]:
                    body = {"model": "m-a", "max_tokens": 20, "messages": ASKED, "tools": [SEARCH]}
                    async with http.post("/v1/messages", json=body, headers={"X-Tenant-ID": tenant}) as answer:
                        assert answer.status == 200, await answer.text()
                        return await answer.json(), answer.headers["x-request-id"]

                async def record() -> Any:
                    async with http.get(f"/v1/requests/{request_id}", params={"allTenants": "true"}) as answer:
                        found = await answer.json()
                    return found if found.get("receipt") else None

                found, request_id = await searched("acme")
                refused, _ = await searched("house")
                (run,) = (await eventually(record, 5.0, "the request is not recorded"))["receipt"]["toolRuns"]
            explained = await mesh.weft("explain", request_id)
    assert service.queries == ["weft mesh"]
    assert [block["type"] for block in found["content"]] == ["server_tool_use", "web_search_tool_result", "text"]
    assert refused["content"][1]["content"]["error_code"] == "unavailable"
    assert (run["tool"], run["host"], run["resultCount"]) == ("web_search", url.removeprefix("http://"), 2)
    assert f"web_search to {run['host']}" in explained
