"""What weft is for, on a real model: up, chat, stream, a killed engine, a killed mesh, and up again."""

import os
import signal
from pathlib import Path

import openai
import pytest
from kit.demo_answers import WITHOUT_END
from mesh_process import MeshProcess, run_weft, running_mesh

from weft_app.compose.demo import DEMO_MODEL

pytestmark = [pytest.mark.real, pytest.mark.main_path]

QUESTION = "Write one sentence about the sea."
ENDLESS_TOKENS = 4000


def _client(mesh: MeshProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="unused")


def _stream(client: openai.OpenAI, max_tokens: int) -> openai.Stream[openai.types.chat.ChatCompletionChunk]:
    return client.chat.completions.create(
        model=DEMO_MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=max_tokens,
        temperature=0.0,
        stream=True,
        extra_body=WITHOUT_END,
    )


def _pieces(stream: openai.Stream[openai.types.chat.ChatCompletionChunk]) -> list[str]:
    return [choice.delta.content for chunk in stream for choice in chunk.choices if choice.delta.content]


async def test_real_model_survives_the_kill_of_its_engine_and_of_the_mesh(tmp_path: Path) -> None:
    home = tmp_path / "home"
    # The kill of the mesh follows at once, and a killed router loses what it has not written yet.
    config = tmp_path / "weft.yaml"
    config.write_text("router: {records: {flush_interval_seconds: 0.1}}")
    with running_mesh(home, "--port", "0", "--config", str(config)) as mesh, _client(mesh) as client:
        code, answer, error = await run_weft("chat", DEMO_MODEL, "-m", QUESTION, "--max-tokens", "8", home=home)
        assert (code, bool(answer.strip())) == (0, True), error
        pieces = _pieces(_stream(client, 8))
        assert len(pieces) >= 3

        cut_off = _stream(client, ENDLESS_TOKENS)
        assert any(choice.delta.content for chunk in cut_off for choice in chunk.choices)
        os.kill((await mesh.describe("local")).process_id, signal.SIGKILL)
        with pytest.raises(openai.APIError):
            list(cut_off)
        assert _pieces(_stream(client, 8)) == pieces, (
            "the next request waits for the engine that replaces the killed one"
        )
        mesh.process.kill()

    with running_mesh(home, "--port", "0") as mesh, _client(mesh) as client:
        assert _pieces(_stream(client, 8)) == pieces
        code, told, error = await run_weft("explain", cut_off.response.headers["x-request-id"], home=home)
        assert (code, "server_died" in told) == (0, True), f"kept over the kill of the mesh: {told}{error}"
