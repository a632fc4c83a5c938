"""Which answers are requested as unary ones, and which with joined texts."""

from typing import Any

import openai
import pytest
from gateway_script import ScriptedDispatcher, Step, delta, finished, serving, started

from weft.api.common.v1 import event_pb2


@pytest.mark.parametrize("stream", [True, False])
async def test_only_non_streamed_answers_are_requested_whole(stream: bool) -> None:
    async with serving(ScriptedDispatcher()) as gateway:
        chat: Any = await gateway.sdk.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], stream=stream
        )
        text: Any = await gateway.sdk.completions.create(model="tiny", prompt="hi", stream=stream)
        if stream:
            assert [chunk async for chunk in chat]
            assert [chunk async for chunk in text]
    assert [call.whole for call in gateway.dispatcher.calls] == [not stream, not stream]


@pytest.mark.parametrize("stream", [True, False])
async def test_streams_request_joined_texts_except_for_responses(stream: bool) -> None:
    async with serving(ScriptedDispatcher()) as gateway:
        chat: Any = await gateway.sdk.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], stream=stream
        )
        text: Any = await gateway.sdk.completions.create(model="tiny", prompt="hi", stream=stream)
        # The last events of a response are held until it is stored: it has a layer of its own around its call.
        response: Any = await gateway.sdk.responses.create(model="tiny", input="hi", stream=stream)
        if stream:
            for answer in (chat, text, response):
                assert [chunk async for chunk in answer]
    assert [call.joined_texts for call in gateway.dispatcher.calls] == [stream, stream, False]


JOINED = event_pb2.InferenceEvent(delta=event_pb2.Delta(text="Hello, \U0001f600!", piece_lengths=[2, 3, 2, 2]))


async def test_client_receives_each_text_of_a_joined_frame() -> None:
    assert sum(JOINED.delta.piece_lengths) == len(JOINED.delta.text)
    steps: list[Step] = [[started()], [delta("a")], [JOINED], [delta(finish="STOP"), finished()]]
    async with serving(ScriptedDispatcher(steps)) as gateway:
        chat: Any = await gateway.sdk.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        texts = [chunk.choices[0].delta.content async for chunk in chat if chunk.choices]
    assert [text for text in texts if text] == ["a", "He", "llo", ", ", "\U0001f600!"]


async def test_inconsistent_text_lengths_end_the_stream_with_an_error() -> None:
    wrong = event_pb2.InferenceEvent(delta=event_pb2.Delta(text="abc", piece_lengths=[1, 1]))
    async with serving(ScriptedDispatcher([[started()], [delta("a")], [wrong], [finished()]])) as gateway:
        chat: Any = await gateway.sdk.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        with pytest.raises(openai.APIError, match="the runner sent 2 lengths, 2 characters in all, for a text of 3"):
            [chunk async for chunk in chat]
