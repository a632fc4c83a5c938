"""The real llama.cpp server with a model that translates, whose template it cannot use itself."""

import asyncio
import sys
from contextlib import aclosing
from pathlib import Path

import pytest
from kit.engine_settings import engine_settings
from kit.tiny_gguf import write_with_template
from kit.translation_template import TRANSLATION_TEMPLATE

from runner_svc.backend.port import CallInfo
from runner_svc.runtimes.llama_server import xllamacpp_launcher
from runner_svc.runtimes.llama_server.llama_server_backend import LlamaServerBackend
from runner_svc.runtimes.llama_server.runtime import LlamaServerModel
from weft.api.common.v1 import chat_pb2, sampling_pb2, tokenize_pb2
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.telemetry.structured_logs import new_traceparent
from weft_app.compose.demo import demo_model_path

pytestmark = [pytest.mark.slow("a real engine"), pytest.mark.real]

SECONDS = 60.0
CALL = CallInfo(request_id="r1", traceparent=new_traceparent())


def _chat(**languages: str) -> chat_pb2.ChatPayload:
    part = chat_pb2.ContentPart(text="Goedemorgen.")
    message = chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=[part])
    payload = chat_pb2.ChatPayload(messages=[message], sampling=sampling_pb2.SamplingParams(max_tokens=4))
    for name, code in languages.items():
        payload.extra_parameters.fields.add(name=name).value.string_value = code
    return payload


async def test_translation_model_starts_and_gets_the_rendered_prompt(tmp_path: Path) -> None:
    file = write_with_template(tmp_path / "translate.gguf", demo_model_path(), TRANSLATION_TEMPLATE)
    command = (sys.executable, "-m", xllamacpp_launcher.__name__)
    settings = engine_settings(LlamaServerModel, command=command, path=file, name="m", context_tokens=512)
    backend = LlamaServerBackend(*settings)
    translation = _chat(source_lang_code="nl", target_lang_code="en")
    async with asyncio.timeout(SECONDS):
        await backend.start()
        try:
            async with aclosing(backend.generate(translation, CALL)) as frames:
                events = [event async for frame in frames for event in frame]
            prompt_tokens = next(event.usage.prompt_tokens for event in events if event.HasField("usage"))
            assert "".join(event.delta.text for event in events)
            text = "<|im_start|>Dutch to English: Goedemorgen."
            expected = await backend.tokenize(tokenize_pb2.TokenizePayload(text=text), CALL)
            counted = await backend.tokenize(tokenize_pb2.TokenizePayload(chat=translation), CALL)
            assert counted.ids == expected.ids
            assert prompt_tokens == expected.count
            with pytest.raises(FieldError, match="is required: the language to translate to"):
                await anext(backend.generate(_chat(), CALL))
        finally:
            await backend.stop()
