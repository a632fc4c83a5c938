import json
from datetime import UTC, datetime

import anthropic
import pytest
from gateway_script import FixedFleet, agent, model, serving
from messages_script import anthropic_of

VERSION = {"anthropic-version": "2023-06-01"}
FLEET = FixedFleet.of(*(model(name) for name in ("a", "b", "c", "d")), agents=[agent("reviewer", "a")])


async def test_client_lists_models_in_pages() -> None:
    async with serving(fleet=FLEET) as gateway, anthropic_of(gateway) as client:
        page = await client.models.list(limit=2)
        found = [entry.id async for entry in page]
    assert ([entry.id for entry in page.data], page.has_more) == (["a", "b"], True)
    assert found == ["a", "b", "c", "d", "agent/reviewer"]


async def test_page_can_end_before_a_model() -> None:
    async with serving(fleet=FLEET) as gateway, anthropic_of(gateway) as client:
        page = await client.models.list(limit=2, before_id="d")
    assert ([entry.id for entry in page.data], page.has_more) == (["b", "c"], True)


async def test_client_gets_one_model() -> None:
    async with serving(fleet=FLEET) as gateway, anthropic_of(gateway) as client:
        found = await client.models.retrieve("a")
        with pytest.raises(anthropic.NotFoundError):
            await client.models.retrieve("nope")
    assert (found.id, found.display_name, found.type, found.lifecycle) == ("a", "a", "model", "active")
    assert found.created_at == datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
    assert found.max_input_tokens == 4096


async def test_list_format_follows_the_calling_api() -> None:
    async with serving(fleet=FLEET) as gateway:
        theirs = json.loads((await gateway.request("GET", "/v1/models?beta=true", headers=VERSION)).body)
        ours = json.loads((await gateway.request("GET", "/v1/models")).body)
    assert set(theirs) == {"data", "has_more", "first_id", "last_id"}
    assert (theirs["first_id"], theirs["last_id"], theirs["has_more"]) == ("a", "agent/reviewer", False)
    assert ours["object"] == "list"
    assert [entry["id"] for entry in ours["data"]] == [entry["id"] for entry in theirs["data"]]


async def test_empty_fleet_returns_an_empty_page() -> None:
    async with serving(fleet=FixedFleet.of()) as gateway:
        page = json.loads((await gateway.request("GET", "/v1/models", headers=VERSION)).body)
    assert page == {"data": [], "has_more": False, "first_id": None, "last_id": None}


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=x", "limit"),
        ("limit=99999999999", "limit"),
        ("limit=00010", "limit"),
        ("after_id=gone", "after_id"),
        ("before_id=gone", "before_id"),
        ("after_id=a&before_id=b", "before_id"),
    ],
)
async def test_invalid_page_parameter_is_rejected_by_name(query: str, field: str) -> None:
    async with serving(fleet=FLEET) as gateway:
        response = await gateway.request("GET", f"/v1/models?{query}", headers=VERSION)
    assert response.status == 400
    assert json.loads(response.body)["error"]["param"] == field


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/a", "/v1/models/agent/reviewer", "/health", "/metrics"])
async def test_head_returns_no_body(path: str) -> None:
    async with serving(fleet=FLEET) as gateway:
        response = await gateway.request("HEAD", path)
    assert (response.status, response.body) == (200, b"")
    assert int(response.headers["content-length"]) > 0
