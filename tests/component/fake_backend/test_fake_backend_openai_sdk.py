"""The official Python SDK takes the fake for the real thing."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import openai
import pytest
from kit.fake_backend import run_fake_backend

pytestmark = pytest.mark.slow("imports the SDK")


@asynccontextmanager
async def _sdk(*flags: str) -> AsyncGenerator[openai.AsyncOpenAI]:
    async with (
        run_fake_backend("--api-key", "secret", "--alias", "tiny", *flags) as backend,
        openai.AsyncOpenAI(base_url=f"{backend.base_url}/v1", api_key="secret", max_retries=0) as client,
    ):
        yield client


async def test_sdk_streams_a_chat() -> None:
    async with _sdk() as client:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=4,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == "tok0 tok1 tok2 tok3"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4


async def test_sdk_lists_the_model_and_raises_its_errors() -> None:
    async with _sdk() as client:
        models = await client.models.list()
        with pytest.raises(openai.BadRequestError, match="exceeds the available context size"):
            await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "w " * 3000}])
    assert [model.id for model in models.data] == ["tiny"]
