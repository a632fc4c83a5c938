"""Chat completions, in the shapes llama-server sends them."""

import asyncio
import json
from typing import Any

import pytest
from fake_backend_client import CHAT, chat_body, fake

pytestmark = pytest.mark.slow("starts fake engines")

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


async def test_a_stream_opens_with_the_role_and_ends_with_a_finish_reason_and_done() -> None:
    async with fake("--alias", "tiny") as client:
        reply = await client.stream(max_tokens=3)
    assert reply.status == 200
    assert reply.headers["Content-Type"] == "text/event-stream"
    assert reply.deltas[0] == {"role": "assistant", "content": None}
    assert reply.text == "tok0 tok1 tok2"
    assert reply.finish_reasons == ["length"]
    assert {chunk["object"] for chunk in reply.chunks} == {"chat.completion.chunk"}
    assert {chunk["model"] for chunk in reply.chunks} == {"tiny"}
    assert len({chunk["id"] for chunk in reply.chunks}) == 1


async def test_usage_comes_in_a_last_chunk_without_choices_when_asked_for() -> None:
    async with fake() as client:
        reply = await client.stream("one two three", stream_options={"include_usage": True})
    last = reply.chunks[-1]
    assert last["choices"] == []
    assert last["usage"] == {
        "completion_tokens": 16,
        "prompt_tokens": 5,
        "total_tokens": 21,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert last["timings"]["prompt_n"] == 5
    assert last["timings"]["predicted_n"] == 16
    assert last["timings"]["predicted_per_second"] > 0


async def test_timings_ride_on_the_finish_chunk_when_no_usage_is_asked_for() -> None:
    async with fake() as client:
        reply = await client.stream()
    assert reply.chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert reply.chunks[-1]["timings"]["predicted_n"] == 16
    assert "usage" not in reply.chunks[-1]


async def test_an_answer_that_is_not_streamed_is_one_object() -> None:
    async with fake("--alias", "tiny") as client:
        reply = await client.chat(max_tokens=2)
    assert reply.headers["Content-Type"] == "application/json; charset=utf-8"
    assert reply.json["object"] == "chat.completion"
    assert reply.json["choices"] == [
        {"finish_reason": "length", "index": 0, "message": {"role": "assistant", "content": "tok0 tok1"}}
    ]
    assert reply.json["usage"]["completion_tokens"] == 2
    assert reply.json["timings"]["predicted_n"] == 2


async def test_a_repeated_prompt_is_served_from_the_prefix_cache_but_for_one_token() -> None:
    async with fake() as client:
        first = await client.chat("a b c d e")
        again = await client.chat("a b c d e")
        longer = await client.chat("a b c d e f g")
        uncached = await client.chat("a b c d e", cache_prompt=False)
    cached = [r.json["usage"]["prompt_tokens_details"]["cached_tokens"] for r in (first, again, longer, uncached)]
    assert cached == [0, 6, 6, 0]


async def test_every_choice_ends_with_a_finish_reason_and_a_usage_of_its_own() -> None:
    async with fake() as client:
        reply = await client.stream(n=3, max_tokens=2, stream_options={"include_usage": True})
        whole = await client.chat(n=3, max_tokens=2)
    choices = [choice for chunk in reply.chunks for choice in chunk["choices"]]
    for index in range(3):
        of_this = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["delta"].get("content") or "" for choice in of_this) == "tok0 tok1"
        assert [choice["finish_reason"] for choice in of_this] == [None, None, None, "length"]
    assert len([chunk for chunk in reply.chunks if "usage" in chunk]) == 3
    assert [choice["index"] for choice in whole.json["choices"]] == [0, 1, 2]


async def test_more_choices_than_slots_are_refused() -> None:
    async with fake("--parallel", "2") as client:
        reply = await client.stream(n=3)
    assert reply.status == 400
    assert reply.headers["Connection"] == "close"
    assert reply.error == {
        "code": 400,
        "message": "Field 'n': Value must be between 1 <= value <= 2, but got 3",
        "type": "invalid_request_error",
    }


async def test_a_stop_string_ends_the_answer_before_it_even_across_tokens() -> None:
    async with fake() as client:
        streamed = await client.stream(stop=["k2 to"])
        whole = await client.chat(stop="tok5")
        unmet = await client.chat(stop="tok15 tok16", max_tokens=16)
    assert streamed.text == "tok0 tok1 to"
    assert streamed.finish_reasons == ["stop"]
    assert whole.json["choices"][0]["message"]["content"] == "tok0 tok1 tok2 tok3 tok4 "
    assert unmet.json["choices"][0]["message"]["content"].endswith(" tok15")
    assert unmet.json["choices"][0]["finish_reason"] == "length"


async def test_log_probabilities_come_with_every_token() -> None:
    async with fake() as client:
        streamed = await client.stream(max_tokens=2, logprobs=True, top_logprobs=3)
        whole = await client.chat(max_tokens=2, logprobs=True)
        refused = await client.chat(top_logprobs=3)
    entries = [c["logprobs"]["content"] for chunk in streamed.chunks for c in chunk["choices"] if "logprobs" in c]
    assert [entry["token"] for content in entries for entry in content] == ["tok0", " tok1"]
    entry = entries[1][0]
    assert bytes(entry["bytes"]).decode() == " tok1"
    assert [top["token"] for top in entry["top_logprobs"]] == [" tok1", "alt1", "alt2"]
    assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] < 0
    assert len(whole.json["choices"][0]["logprobs"]["content"]) == 2
    assert refused.status == 400


async def test_the_model_can_echo_and_can_be_given_its_text() -> None:
    async with fake(echo=True) as client:
        assert (await client.stream("say  this\nback")).text == "say  this\nback"
        await client.backend.set_behaviour(text="scripted words")
        assert (await client.stream("anything")).text == "scripted words"


async def test_a_counted_answer_goes_on_to_the_context_when_it_has_no_end() -> None:
    async with fake("--ctx-size", "40", "--parallel", "1", answer_tokens=0) as client:
        reply = await client.chat("one two")
    assert reply.json["usage"]["total_tokens"] == 40
    assert reply.json["choices"][0]["finish_reason"] == "length"


async def test_ignoring_the_end_generates_up_to_the_limit() -> None:
    async with fake() as client:
        reply = await client.chat(ignore_eos=True, max_tokens=40)
    assert reply.json["usage"]["completion_tokens"] == 40


@pytest.mark.parametrize("streamed", [True, False])
async def test_reasoning_comes_before_the_answer(streamed: bool) -> None:
    async with fake(reasoning_text="let me think", text="yes") as client:
        reply = await client.chat(stream=streamed)
    if streamed:
        kinds = [next(iter(delta)) for delta in reply.deltas[1:-1]]
        assert kinds == ["reasoning_content"] * 3 + ["content"]
    else:
        message = reply.json["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "yes", "reasoning_content": "let me think"}


async def test_a_scripted_tool_call_is_streamed_in_fragments() -> None:
    async with fake(tool_call={"name": "get_weather", "arguments": '{"city": "Paris"}'}) as client:
        reply = await client.stream(tools=[TOOL])
    calls = [call for delta in reply.deltas for call in delta.get("tool_calls", [])]
    assert calls[0] == {
        "index": 0,
        "id": "call_0",
        "type": "function",
        "function": {"name": "get_weather", "arguments": ""},
    }
    assert len(calls) > 3
    assert all(set(call) == {"index", "function"} for call in calls[1:])
    assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Paris"}'
    assert reply.finish_reasons == ["tool_calls"]


async def test_several_tool_calls_come_in_one_turn() -> None:
    script: list[Any] = [{"name": "a", "arguments": "{}"}, {"name": "b", "arguments": '{"x": 1}'}]
    async with fake(tool_call=script) as client:
        reply = await client.chat(tools=[TOOL])
    message = reply.json["choices"][0]["message"]
    assert message["content"] is None
    assert [call["function"] for call in message["tool_calls"]] == script
    assert [call["id"] for call in message["tool_calls"]] == ["call_0", "call_1"]


async def test_a_tool_is_called_only_when_offered_and_not_yet_answered() -> None:
    async with fake(tool_call={"name": "get_weather"}) as client:
        without = await client.stream()
        forbidden = await client.stream(tools=[TOOL], tool_choice="none")
        messages = [{"role": "user", "content": "?"}, {"role": "tool", "content": "sunny", "tool_call_id": "call_0"}]
        answered = await client.post(CHAT, {"messages": messages, "tools": [TOOL], "stream": True})
    assert [reply.finish_reasons for reply in (without, forbidden, answered)] == [["stop"]] * 3


async def test_a_json_answer_is_json_and_follows_the_common_part_of_its_schema() -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 3},
            "mood": {"enum": ["good", "bad"]},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}},
        },
        "$defs": {"tag": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}},
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    async with fake() as client:
        by_schema = await client.stream(response_format=form)
        any_object = await client.stream(response_format={"type": "json_object"})
        refused = await client.stream(response_format={"type": "xml"})
    assert json.loads(by_schema.text) == {"name": "tok0", "age": 3, "mood": "good", "tags": [True]}
    assert isinstance(json.loads(any_object.text), dict)
    assert refused.status == 400


async def test_prefill_progress_is_reported_when_asked_for() -> None:
    async with fake(prefill_progress=3, prefill_seconds=0.1) as client:
        asked = await client.stream("a b c d", return_progress=True)
        unasked = await client.stream("a b c d")
    reports = [chunk["prompt_progress"] for chunk in asked.chunks if "prompt_progress" in chunk]
    assert [(report["processed"], report["total"]) for report in reports] == [(0, 6), (3, 6), (6, 6)]
    assert reports[-1]["time_ms"] >= 100
    assert not any("prompt_progress" in chunk for chunk in unasked.chunks)


async def test_a_prompt_that_fills_the_context_is_refused_with_both_sizes() -> None:
    async with fake("--ctx-size", "20", "--parallel", "2") as client:
        reply = await client.stream("word " * 12)
    assert reply.status == 400
    assert reply.error["type"] == "exceed_context_size_error"
    assert (reply.error["n_prompt_tokens"], reply.error["n_ctx"]) == (15, 10)


async def test_the_token_speed_is_kept() -> None:
    async with fake(tokens_per_second=50) as client:
        loop = asyncio.get_running_loop()
        started = loop.time()
        async with client.open_stream(max_tokens=10) as response:
            reads = [chunk async for chunk in response.content.iter_any()]
        assert 0.19 < loop.time() - started < 1.0
    assert len(reads) >= 5, "slow tokens are sent one by one"


async def test_full_speed_writes_many_events_at_once() -> None:
    async with fake("--ctx-size", "100000") as client:
        reply = await client.stream(max_tokens=20_000, ignore_eos=True)
        state = await client.backend.state()
    assert len(reply.chunks) == 20_002
    assert state.tokens_sent == 20_000


@pytest.mark.parametrize(
    "body",
    [
        [],
        {},
        {"messages": "hello"},
        {"messages": ["hello"]},
        {"messages": [{"role": "user", "content": 7}]},
        chat_body("x", n=0),
        chat_body("x", max_tokens="many"),
        chat_body("x", stop=[1]),
    ],
)
async def test_a_malformed_request_is_refused_as_such(body: Any) -> None:
    async with fake() as client:
        reply = await client.post(CHAT, body)
    assert reply.status == 400
    assert reply.error["code"] == 400
    assert reply.error["type"] == "invalid_request_error"
