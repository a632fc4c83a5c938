"""Scripted turns: what the model says depends on how often it has spoken since the user did."""

from typing import Any

from fake_backend_client import CHAT, fake

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TURNS = [{"text": "One.", "calls": [{"name": "add"}]}, {"calls": [{"name": "add"}]}, {"text": "Three."}]
USER = {"role": "user", "content": "Go."}
SPOKEN = {"role": "assistant", "content": ""}
RESULT = {"role": "tool", "content": "3", "tool_call_id": "call_0"}


async def _message(client: Any, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    reply = await client.post(CHAT, {"messages": list(messages), **fields})
    message: dict[str, Any] = reply.json["choices"][0]["message"]
    return message


async def test_each_turn_after_the_user_says_its_own_part() -> None:
    async with fake(turns=TURNS) as client:
        first = await _message(client, USER, tools=[TOOL])
        second = await _message(client, USER, SPOKEN, RESULT, tools=[TOOL])
        third = await _message(client, USER, SPOKEN, RESULT, SPOKEN, RESULT, tools=[TOOL])
        anew = await _message(client, USER, SPOKEN, USER, tools=[TOOL])
    assert (first["content"], first["tool_calls"][0]["function"]["name"]) == ("One.", "add")
    assert second["tool_calls"][0]["function"]["name"] == "add"
    assert (third["content"], "tool_calls" in third) == ("Three.", False)
    assert anew["content"] == "One."


async def test_nothing_is_called_where_no_tool_may_be() -> None:
    async with fake(turns=TURNS) as client:
        assert "tool_calls" not in await _message(client, USER)
        assert "tool_calls" not in await _message(client, USER, tools=[TOOL], tool_choice="none")
