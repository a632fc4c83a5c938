"""Responses over a whole mesh: what is kept is there after a restart, and what is cancelled leaves its engine."""

import asyncio
from pathlib import Path

import openai
import pytest
from mesh_process import POOL, MeshProcess, fake_runner, running_mesh, write_config
from openai import AsyncOpenAI


async def test_conversation_survives_a_restart_per_tenant_and_a_cancelled_response_is_stored(
    tmp_path: Path,
) -> None:
    config = str(write_config(tmp_path, fake_runner("a", echo=True)))
    home = tmp_path / "home"
    with running_mesh(home, "--config", config) as mesh:
        async with AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="unused", max_retries=0) as client:
            first = await client.responses.create(model=POOL, input="My favorite color is teal.")
    assert first.status == "completed"
    with running_mesh(home, "--config", config) as mesh:
        async with AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="unused", max_retries=0) as client:
            kept = await client.responses.retrieve(first.id)
            async with client.responses.stream(model=POOL, input="Which one?", previous_response_id=first.id) as stream:
                second = await stream.get_final_response()
            items = await client.responses.input_items.list(first.id)
            other = client.with_options(default_headers={"X-Tenant-ID": "other"})
            with pytest.raises(openai.NotFoundError):
                await other.responses.retrieve(first.id)
            with pytest.raises(openai.NotFoundError) as caught:
                await other.responses.create(model=POOL, input="Which one?", previous_response_id=first.id)
            await _require_that_a_cancelled_one_leaves_its_engine_and_is_kept(mesh, client)
    assert kept.output_text == first.output_text
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    assert len(items.data) == 1
    assert caught.value.code == "previous_response_not_found"


async def _require_that_a_cancelled_one_leaves_its_engine_and_is_kept(mesh: MeshProcess, client: AsyncOpenAI) -> None:
    async with await mesh.backend("a") as backend:
        await backend.set_behaviour(tokens_per_second=20.0, answer_tokens=0, echo=False)
        stream = await client.responses.create(model=POOL, input="Count", stream=True)
        created = await anext(stream)
        assert created.type == "response.created"
        response_id = created.response.id
        said = asyncio.Event()
        ended = asyncio.create_task(_read(stream, said))
        await said.wait()
        cancelled = await client.responses.cancel(response_id)
        await backend.wait_for_state(lambda state: state.active_requests == 0)
    with pytest.raises(openai.APIError) as caught:
        await ended
    kept = await client.responses.retrieve(response_id)
    assert cancelled.status == kept.status == "cancelled"
    assert kept.output_text == cancelled.output_text != ""
    assert caught.value.code == "cancelled"


async def _read(stream: "openai.AsyncStream[openai.types.responses.ResponseStreamEvent]", said: asyncio.Event) -> None:
    async for event in stream:
        if event.type == "response.output_text.delta":
            said.set()
