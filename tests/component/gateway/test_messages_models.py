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


async def test_list_format_follows_the_calling_api() -> None:
    async with serving(fleet=FLEET) as gateway:
        theirs = (await gateway.request("GET", "/v1/models?beta=true", headers=VERSION)).json
        ours = (await gateway.request("GET", "/v1/models")).json
    assert set(theirs) == {"data", "has_more", "first_id", "last_id"}
    assert (theirs["first_id"], theirs["last_id"], theirs["has_more"]) == ("a", "agent/reviewer", False)
    assert ours["object"] == "list"
    assert [entry["id"] for entry in ours["data"]] == [entry["id"] for entry in theirs["data"]]


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
    assert response.error["param"] == field
