"""Searches in conversations that are compacted first: each pass of the model reads the summary."""

import json
from typing import Any

import pytest
from search_stage import HOSTED, SEARCH, Passes, called, said, searching

LONG = "print(1) " * 500
ASKED = [
    {"role": "user", "content": LONG},
    {"role": "assistant", "content": "I see."},
    {"role": "user", "content": "What is weft?"},
]
MESSAGES = {"edits": [{"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 500}}]}
RESPONSES = [{"type": "compaction", "compact_threshold": 500}]


@pytest.mark.parametrize(
    ("path", "fields", "kinds"),
    [
        (
            "/v1/messages",
            {"messages": ASKED, "tools": [SEARCH], "context_management": MESSAGES, "max_tokens": 50},
            ["compaction", "server_tool_use", "web_search_tool_result", "text"],
        ),
        (
            "/v1/responses",
            {"input": ASKED, "tools": [HOSTED], "context_management": RESPONSES},
            ["compaction", "web_search_call", "message"],
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_passes_after_a_search_read_the_summary(
    path: str, fields: dict[str, Any], kinds: list[str], stream: bool
) -> None:
    passes = Passes(passes=[said("It was about printing."), called(), said("It is a mesh.")])
    async with searching(passes) as (gateway, service):
        answer = await gateway.request("POST", path, {"model": "tiny", "stream": stream, **fields})
    assert (answer.status, service.queries) == (200, ["weft mesh"])
    if not stream:
        made = answer.json
        assert [each["type"] for each in made.get("content") or made["output"]] == kinds
    else:
        at = [answer.body.find(json.dumps(kind).encode()) for kind in kinds]
        assert -1 not in at
        assert at[0] < at[1] < at[-1]
    _, first, last = passes.seen
    assert ["printing" in chat.messages[0].content[0].text for chat in (first, last)] == [True, True]
    assert (len(first.messages), len(last.messages)) == (1, 3)
