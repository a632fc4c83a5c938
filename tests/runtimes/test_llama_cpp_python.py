"""The Backend suite on llama-cpp-python itself, in its own process, with the demo model."""

import os
from pathlib import Path
from typing import Any
from unittest import SkipTest

import pytest
from kit.engine_settings import engine_settings
from kit.one_model import OneModel
from native_builds import LLAMA_CPP, ROOT, built_llama_cpp_python, built_llama_server

from runner_svc.backend.port import Backend, CallInfo, LoadOrder
from runner_svc.cache.manager import CacheManager
from runner_svc.cache.prompt_store import PromptStore
from runner_svc.runtimes.llama_server.llama_server_backend import LlamaServerBackend
from runner_svc.runtimes.llama_server.runtime import LlamaServerModel
from weft.api.common.v1 import chat_pb2, completion_pb2, event_pb2, sampling_pb2
from weft.dispatch.frames import GenerationPayload
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Handling
from weft_app.compose.demo import demo_model_path
from weft_extensions.engines.llama_cpp_python.llama_cpp_python_backend import LlamaCppPythonBackend
from weft_extensions.engines.llama_cpp_python.runtime import LlamaCppPythonModel
from weft_testing.conformance.backend import BackendConformance, Engine
from weft_testing.conformance.prefix_cache import MODEL

SERVER_PROGRAM = "weft_extensions.engines.llama_cpp_python.server"

pytestmark = [pytest.mark.runtimes, pytest.mark.timeout(3700)]

CALL = CallInfo(request_id="r1", traceparent="")


@pytest.fixture(scope="session")
def interpreter() -> Path:
    return built_llama_cpp_python()


def _backend(interpreter: Path, **settings: Any) -> LlamaCppPythonBackend:
    return LlamaCppPythonBackend(
        *engine_settings(
            LlamaCppPythonModel,
            # The environment has neither weft nor its dependencies, only what the server program needs.
            command=(str(interpreter), "-m", SERVER_PROGRAM),
            environment={**os.environ, "PYTHONPATH": str(ROOT), "LLAMA_CPP_LIB_PATH": str(LLAMA_CPP / "bin")},
            path=demo_model_path(),
            **settings,
        )
    )


class TestLlamaCppPython(BackendConformance):
    @pytest.fixture(autouse=True)
    def _interpreter(self, interpreter: Path, tmp_path: Path) -> None:
        self._python = interpreter
        self._tmp_path = tmp_path

    def make_variant(self) -> Path:
        variant = self._tmp_path / "variant.gguf"
        variant.symlink_to(demo_model_path())
        return variant

    def make_backend(self, engine: Engine) -> LlamaCppPythonBackend:
        if engine not in (Engine.NORMAL, Engine.SLOW):
            raise SkipTest("the real library has no such fault switch")
        return _backend(self._python, context_tokens=4096 if engine is Engine.SLOW else 1024)


def _chat(text: str, **fields: Any) -> chat_pb2.ChatPayload:
    message = chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=[chat_pb2.ContentPart(text=text)])
    return chat_pb2.ChatPayload(messages=[message], **fields)


async def _text(backend: Backend, payload: GenerationPayload) -> tuple[str, event_pb2.InferenceEvent]:
    events = [event async for frame in backend.generate(payload, CALL) for event in frame]
    return "".join(event.delta.text for event in events), events[-1]


async def test_schema_grammar_and_bias_are_followed(interpreter: Path) -> None:
    backend = _backend(interpreter)
    greedy = sampling_pb2.SamplingParams(temperature=0, max_tokens=40)
    schema = chat_pb2.ResponseFormat()
    declared = schema.json_schema
    declared.name = "answer"
    declared.schema.fields.add(name="enum").value.array_value.values.add().string_value = "violet"
    await backend.start()
    try:
        text, _ = await _text(backend, _chat("Name a colour.", sampling=greedy, response_format=schema))
        assert text.strip() == '"violet"'
        anything = chat_pb2.ResponseFormat(json_object=True)
        text, _ = await _text(backend, _chat("A JSON object.", sampling=greedy, response_format=anything))
        assert text.lstrip().startswith("{")
        with_grammar = _chat("Hello.", sampling=greedy)
        with_grammar.extra_parameters.fields.add(name="grammar").value.string_value = 'root ::= "yes" | "no"'
        text, end = await _text(backend, with_grammar)
        assert text in ("yes", "no")
        assert end.finished.receipt.usage.completion_tokens <= 3
        for refused in ("root ::= (((", "nothing", 'root ::= root "a"'):
            with_grammar.extra_parameters.fields[0].value.string_value = refused
            with pytest.raises(WeftError) as failed:
                await _text(backend, with_grammar)
            assert failed.value.reason in (Reason.INVALID_ARGUMENT, Reason.BACKEND_REJECTED), "and the process lives on"
        plain, _ = await _text(backend, _chat("Hello.", sampling=greedy))
        biased = sampling_pb2.SamplingParams(temperature=0, max_tokens=5, logit_bias={2: 100})
        stopped, end = await _text(backend, _chat("Hello.", sampling=biased))
        assert plain
        assert stopped == ""
        assert end.finished.receipt.usage.completion_tokens == 1
    finally:
        await backend.stop()


async def test_prompt_restored_after_an_unload_continues_with_the_same_tokens(
    interpreter: Path, tmp_path: Path
) -> None:
    backend = _backend(interpreter, name=MODEL, context_tokens=2048)
    model = OneModel(backend)
    desk = CacheManager([model], store=PromptStore(tmp_path / "prompts", 2**30))
    greedy = sampling_pb2.SamplingParams(temperature=0, max_tokens=256)
    payload = _chat("Tell me about the sea, the hills and the city. " * 60, sampling=greedy)

    async def ask() -> tuple[int, str]:
        async with await desk.of_request(MODEL, "a", Handling()).generating(payload) as turn:
            call = CallInfo(request_id="r1", traceparent="", cache=turn.use)
            events = [event async for frame in backend.generate(payload, call) for event in frame]
            turn.worked = True
        answer = "".join(event.delta.text for event in events)
        return events[-1].finished.receipt.usage.cached_prompt_tokens, answer

    await desk.open()
    await backend.start()
    try:
        assert (await ask())[0] == 0
        undisturbed = await ask()
        await desk.put_away(model)
        await backend.stop()
        await desk.settle()
        await backend.start()
        assert await ask() == undisturbed
        assert undisturbed[0] > 600
    finally:
        await desk.close()
        await backend.stop()


async def test_prompt_token_counts_match_llama_server(interpreter: Path) -> None:
    message = chat_pb2.ChatMessage(role=chat_pb2.ROLE_SYSTEM, content=[chat_pb2.ContentPart(text="Be brief.")])
    chats = [_chat("Hello \u2603 <|im_end|> there.\n\n  x"), _chat("Why?")]
    for chat in chats:
        chat.sampling.max_tokens = 2
    chats[1].messages.insert(0, message)
    prompts = [completion_pb2.PromptInput(text=text) for text in ("Once upon a time", " <s>  two")]
    sampling = sampling_pb2.SamplingParams(max_tokens=2)
    payloads: list[GenerationPayload] = [*chats, completion_pb2.CompletionPayload(prompts=prompts, sampling=sampling)]
    server = engine_settings(
        LlamaServerModel, command=(str(built_llama_server()),), path=demo_model_path(), name="smollm2"
    )
    counts: list[list[int]] = []
    for backend in (_backend(interpreter), LlamaServerBackend(*server)):
        await backend.start()
        try:
            ends = [(await _text(backend, payload))[1] for payload in payloads]
        finally:
            await backend.stop()
        counts.append([end.finished.receipt.usage.prompt_tokens for end in ends])
    assert counts[0] == counts[1]
    assert all(counts[0])


async def test_library_accepts_every_declared_parameter(interpreter: Path) -> None:
    backend = _backend(interpreter, context_tokens=1024)
    values: dict[str, Any] = {
        "context_tokens": 512,
        "gpu_layers": 0,
        "flash_attention": "on",
        "cache_type_k": "q8_0",
        "cache_type_v": "q5_1",
        "batch_tokens": 128,
    }
    assert {parameter.name for parameter in backend.load_parameters} == set(values)
    facts = await backend.start(LoadOrder(parameters=values))
    try:
        assert (facts.context_tokens, facts.slots) == (512, 1)
        greedy = sampling_pb2.SamplingParams(temperature=0, max_tokens=4)
        _, end = await _text(backend, _chat("Count to three.", sampling=greedy))
        assert end.finished.receipt.usage.completion_tokens == 4
    finally:
        await backend.stop()
