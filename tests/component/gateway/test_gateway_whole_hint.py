"""Which answers are requested as unary ones."""

from typing import Any

import pytest
from gateway_script import ScriptedDispatcher, serving


@pytest.mark.parametrize("stream", [True, False])
async def test_only_an_answer_that_is_not_streamed_is_asked_for_whole(stream: bool) -> None:
    async with serving(ScriptedDispatcher()) as gateway:
        chat: Any = await gateway.sdk.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], stream=stream
        )
        text: Any = await gateway.sdk.completions.create(model="tiny", prompt="hi", stream=stream)
        if stream:
            assert [chunk async for chunk in chat]
            assert [chunk async for chunk in text]
    assert [call.whole for call in gateway.dispatcher.calls] == [not stream, not stream]
