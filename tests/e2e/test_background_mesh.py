"""Responses in the background over a whole mesh: they outlive every process that has to do with them."""

import asyncio
from pathlib import Path

import openai
import pytest
from mesh_process import POOL, MeshProcess, fake_runner, running_mesh, write_config
from openai import AsyncOpenAI
from openai.types.responses import Response

DECLARED = f"""
kind: model
name: later
poolName: {POOL}
---
kind: model
name: served-by-none
"""


def client_of(mesh: MeshProcess) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="unused", max_retries=0)


async def at_its_end(client: AsyncOpenAI, response_id: str) -> Response:
    """The response once its stream has come to its end; asked again where it is said that the answer restarts."""
    while True:
        try:
            async for _ in await client.responses.retrieve(response_id, stream=True):
                pass
        except openai.APIError as error:
            # A router that is back at once shows what it finds, until the lease of the lost attempt is over.
            assert "the answer restarts" in error.message, error  # noqa: PT017 - anything else is not expected
        else:
            return await client.responses.retrieve(response_id)


async def test_background_response_without_a_runner_completes_and_continues_after_a_restart(tmp_path: Path) -> None:
    home = tmp_path / "home"
    without = str(write_config(tmp_path, fake_runner("b", pool="other")))
    with running_mesh(home, "--config", without) as mesh:
        # Names that nothing has are refused; these are declared, and no runner serves them yet.
        await mesh.weft("apply", "-f", "-", stdin=DECLARED)
        async with client_of(mesh) as client:
            made = await client.responses.create(model=POOL, input="My favorite color is teal.", background=True)
            with pytest.raises(openai.BadRequestError):
                await client.responses.create(model=POOL, input="Which?", previous_response_id=made.id)
    assert made.status == "queued"
    with_it = str(write_config(tmp_path, fake_runner("a", echo=True)))
    with running_mesh(home, "--config", with_it) as mesh:
        async with client_of(mesh) as client, asyncio.timeout(60):
            first = await at_its_end(client, made.id)
            second = await client.responses.create(model=POOL, input="Which?", previous_response_id=made.id)
            whole = [event async for event in await client.responses.retrieve(made.id, stream=True)]
            cancelled = await client.responses.create(model="served-by-none", input="x", background=True)
            ended = await client.responses.cancel(cancelled.id)
            await client.responses.delete(cancelled.id)
    assert (first.status, ended.status) == ("completed", "cancelled")
    assert "teal" in first.output_text
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    with running_mesh(home, "--config", with_it) as mesh:
        async with client_of(mesh) as client:
            rest = [event async for event in await client.responses.retrieve(made.id, stream=True, starting_after=3)]
            again = await client.responses.retrieve(made.id)
    assert rest == whole[4:]
    assert again == first


async def test_conversation_continues_after_a_restart_with_the_response_that_ran_in_the_background(
    tmp_path: Path,
) -> None:
    home = tmp_path / "home"
    without = str(write_config(tmp_path, fake_runner("b", pool="other")))
    with running_mesh(home, "--config", without) as mesh:
        await mesh.weft("apply", "-f", "-", stdin=DECLARED)
        async with client_of(mesh) as client:
            made = await client.conversations.create(items=[{"role": "user", "content": "My color is teal."}])
            waits = await client.responses.create(model=POOL, input="Which?", conversation=made.id, background=True)
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(model=POOL, input="Which?", conversation=made.id)
    with_it = str(write_config(tmp_path, fake_runner("a", echo=True)))
    with running_mesh(home, "--config", with_it) as mesh:
        async with client_of(mesh) as client, asyncio.timeout(60):
            first = await at_its_end(client, waits.id)
            second = await client.responses.create(model=POOL, input="Again?", conversation=made.id, store=False)
            items = [item.to_dict() async for item in client.conversations.items.list(made.id, order="asc")]
    assert refused.value.code == "conversation_locked"
    assert [item["role"] for item in items] == ["user", "user", "assistant", "user", "assistant"]
    assert items[2]["id"] == first.output[0].id
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
