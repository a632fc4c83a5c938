"""Options of one load on the real llama.cpp server with the demo model."""

import asyncio
import socket
import sys
from typing import Any

import psutil
import pytest
from kit.demo_answers import sampling_without_end
from kit.engine_settings import engine_settings
from kit.engines import CALL, chat
from kit.tiny_gguf import SMOLLM2_WIDTH

from runner_svc.backend import engine_process
from runner_svc.backend.engine_process import EnginePorts, PortRange
from runner_svc.backend.port import LoadOrder
from runner_svc.runtimes.llama_server.llama_server_backend import LlamaServerBackend
from runner_svc.runtimes.llama_server.runtime import LAUNCHER, LlamaServerModel
from weft.api.common.v1 import completion_pb2, embedding_pb2
from weft_app.compose.demo import demo_model_path

pytestmark = [pytest.mark.slow("a real engine"), pytest.mark.real]

LOAD_SECONDS = 60.0


def _backend(**settings: Any) -> LlamaServerBackend:
    return LlamaServerBackend(
        *engine_settings(
            LlamaServerModel,
            command=(sys.executable, "-m", LAUNCHER),
            path=demo_model_path(),
            name="smollm2",
            slots=2,
            trained_context_tokens=8192,
            **{"context_tokens": 1024, **settings},
        )
    )


async def _answer_tokens(backend: LlamaServerBackend) -> int:
    payload = chat("Count to three.", sampling=sampling_without_end(max_tokens=4))
    async with asyncio.timeout(LOAD_SECONDS):
        events = [event async for frame in backend.generate(payload, CALL) for event in frame]
    return events[-1].finished.receipt.usage.completion_tokens


async def test_real_server_accepts_every_declared_parameter() -> None:
    values: dict[str, Any] = {
        "context_tokens": 512,
        "slots": 1,
        "threads": 1,
        "gpu_layers": 0,
        "flash_attention": "on",
        "cache_type_k": "q8_0",
        "cache_type_v": "q5_1",
        "batch_tokens": 256,
        "ubatch_tokens": 128,
        "image_max_tokens": 256,
        "spec_type": "ngram-simple",
        "spec_draft_n_max": 3,
        "spec_draft_p_min": 0.5,
        "spec_draft_ngl": 0,
    }
    backend = _backend()
    assert {parameter.name for parameter in backend.load_parameters} == set(values)
    try:
        async with asyncio.timeout(LOAD_SECONDS):
            facts = await backend.start(LoadOrder(parameters=values))
        assert facts.context_tokens == 512
        assert await _answer_tokens(backend) == 4
    finally:
        await backend.stop()


async def test_real_server_retries_on_a_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "_is_free", lambda _: True)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        backend = _backend(ports=EnginePorts(PortRange(first=port, last=port + 3)))
        try:
            async with asyncio.timeout(LOAD_SECONDS):
                await backend.start()
            process = psutil.Process(backend.process_id)
            listens = {one.laddr.port for one in process.net_connections() if one.status == psutil.CONN_LISTEN}
            assert listens <= {port + 1, port + 2, port + 3}
            assert len(listens) == 1
        finally:
            await backend.stop()


async def test_real_server_uses_a_separate_draft_model() -> None:
    backend = _backend(draft_model_path=demo_model_path())
    try:
        async with asyncio.timeout(LOAD_SECONDS):
            await backend.start()
        assert await _answer_tokens(backend) == 4
        assert any("draft" in line for line in backend.log_lines(1000)), "the server loaded it"
    finally:
        await backend.stop()


async def test_text_longer_than_the_default_physical_batch_is_embedded() -> None:
    backend = _backend(context_tokens=2048)
    text = completion_pb2.PromptInput(text="word " * 1500)
    try:
        async with asyncio.timeout(LOAD_SECONDS):
            await backend.start()
        result = await backend.embed(embedding_pb2.EmbeddingPayload(inputs=[text]), CALL)
    finally:
        await backend.stop()
    assert [len(vector.values) for vector in result.embeddings] == [SMOLLM2_WIDTH]
    assert 1_500 <= result.usage.prompt_tokens < 2_048
