"""The real llama.cpp server tells its load, and the memory of its weights and its KV cache."""

import asyncio
import sys
from contextlib import aclosing

import pytest
from kit.demo_answers import sampling_without_end
from kit.engine_settings import engine_settings

from runner_svc.backend.port import CallInfo
from runner_svc.model_files.gguf import read_gguf_header
from runner_svc.policy.memory_estimate import MEBIBYTE
from runner_svc.runtimes import engine_figures
from runner_svc.runtimes.llama_server import xllamacpp_launcher
from runner_svc.runtimes.llama_server.llama_server_backend import LlamaServerBackend
from runner_svc.runtimes.llama_server.runtime import LlamaServerModel
from weft.api.common.v1 import chat_pb2
from weft.kernel.telemetry.structured_logs import new_traceparent
from weft_app.compose.demo import demo_model_path

pytestmark = [pytest.mark.slow("a real engine"), pytest.mark.real]

SECONDS = 60.0
CALL = CallInfo(request_id="r1", traceparent=new_traceparent())
_TEXT = chat_pb2.ContentPart(text="Tell me a long story about a river.")
STORY = chat_pb2.ChatPayload(
    messages=[chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=[_TEXT])],
    sampling=sampling_without_end(max_tokens=3000),
)


async def test_real_server_reports_requests_prompt_tokens_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_figures, "SAMPLE_SECONDS", 0.2)
    command = (sys.executable, "-m", xllamacpp_launcher.__name__)
    model = engine_settings(
        LlamaServerModel, command=command, path=demo_model_path(), name="m", slots=2, context_tokens=4096
    )
    backend = LlamaServerBackend(*model)
    await backend.start()
    try:
        async with aclosing(backend.generate(STORY, CALL)) as frames:
            await anext(frames)
            load = None
            async with asyncio.timeout(SECONDS):
                while load is None or not load.running_count or not load.prefix_query_tokens:
                    await anext(frames)
                    load = backend.engine_load
        assert (load.running_count, load.waiting_count) == (1, 0)
        assert load.prefix_query_tokens > 10
        assert load.HasField("sample_time")
        assert load.kv_cache_bytes == 180 * MEBIBYTE
        header = read_gguf_header(demo_model_path())
        assert load.weight_bytes == pytest.approx(header.weight_bytes, rel=0.01)
    finally:
        await backend.stop()
