"""The llama-cpp-python backend with its real server process, over a fake of the library."""

import asyncio
import json
from contextlib import AbstractAsyncContextManager, aclosing
from pathlib import Path
from typing import Any

import pytest
from hosted_stage import SWITCHES, scripted
from kit.engine_settings import engine_settings
from kit.engines import CALL, chat, events_of, failure_of, frames_of, reply, started
from kit.failures import expect_failure, fails
from kit.own_children import own_children
from kit.tiny_gguf import write_gguf

from runner_svc.backend.port import BackendFacts, CacheUse, CallInfo
from weft.api.common.v1 import chat_pb2, completion_pb2, embedding_pb2, event_pb2, sampling_pb2, tokenize_pb2
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import TEXT_OPERATIONS, Operation
from weft_extensions.engines.llama_cpp_python.llama_cpp_python_backend import LlamaCppPythonBackend
from weft_extensions.engines.llama_cpp_python.runtime import LlamaCppPythonModel
from weft_testing.conformance.backend import BackendConformance, Engine

pytestmark = pytest.mark.slow("starts engine processes")


def _backend(model: Path, switches: dict[str, Any] | None = None, **settings: Any) -> LlamaCppPythonBackend:
    return LlamaCppPythonBackend(
        *engine_settings(LlamaCppPythonModel, path=model, **scripted("SCRIPTED_LLAMA", switches, **settings))
    )


class TestLlamaCppPythonOverAScriptedLibrary(BackendConformance):
    @pytest.fixture(autouse=True)
    def _model(self, tmp_path: Path) -> None:
        self._path = write_gguf(tmp_path / "tiny.gguf")

    def make_variant(self) -> Path:
        return write_gguf(self._path.with_name("variant.gguf"))

    def make_backend(self, engine: Engine) -> LlamaCppPythonBackend:
        return _backend(self._path, SWITCHES[engine], context_tokens=4096 if engine is Engine.SLOW else 1024)


def _running(
    model: Path, switches: dict[str, Any] | None = None, **settings: Any
) -> AbstractAsyncContextManager[tuple[LlamaCppPythonBackend, BackendFacts]]:
    return started(_backend(model, switches, **settings))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


def _schema(text: str, count: int = 0) -> chat_pb2.ResponseFormat:
    made = chat_pb2.ResponseFormat()
    made.json_schema.name = "answer"
    value = made.json_schema.schema.fields.add(name=text).value
    if count:
        value.integer_value = count
    else:
        value.bool_value = True
    return made


async def test_prompt_is_the_rendered_template_with_one_bos_token(model: Path) -> None:
    async with _running(model, {"echo_prompt": True}) as (backend, facts):
        assert await reply(backend, chat("hello")) == "[user]hello[assistant]"
        tool = chat_pb2.Tool(function=chat_pb2.FunctionTool(name="f"))
        assert "1 tools" in await reply(backend, chat(tools=[tool]))
        none = chat_pb2.ToolChoice(mode=chat_pb2.ToolChoice.MODE_NONE)
        assert "tools" not in await reply(backend, chat(tools=[tool], tool_choice=none))
        assert "[think]" in await reply(backend, chat(thinking=True))
        usage = (await events_of(backend, chat("hello")))[-1].finished.receipt.usage
        assert usage.prompt_tokens == len("[user]hello[assistant]") + 1, "the beginning counts once"
    assert facts.operations == TEXT_OPERATIONS | {Operation.TOKENIZE}


async def test_tokens_are_counted_while_the_engine_generates(model: Path) -> None:
    payload = tokenize_pb2.TokenizePayload(text="<s>ab", add_special=True, with_pieces=True)
    async with (
        _running(model, {"endless": True, "seconds_per_token": 0.05}) as (backend, _),
        aclosing(backend.generate(chat("hello"), CALL)) as frames,
    ):
        await anext(frames)
        async with asyncio.timeout(10):
            counted = await backend.tokenize(payload, CALL)
    # One beginning that the tokenizer adds, and one that the text itself names.
    assert (counted.count, list(counted.ids)[:2]) == (4, [1, 1])
    assert list(counted.pieces) == [b"", b"", b"a", b"b"]


async def test_override_and_tool_templates_are_used(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "m.gguf", "usual", tool_use="with tools")
    tool = chat_pb2.Tool(function=chat_pb2.FunctionTool(name="f"))
    async with _running(model, {"echo_prompt": True}) as (backend, _):
        assert await reply(backend, chat()) == "usual"
        assert await reply(backend, chat(tools=[tool])) == "with tools"
    override = tmp_path / "template.jinja"
    override.write_text("override")
    async with _running(model, {"echo_prompt": True}, chat_template_path=override) as (backend, _):
        assert await reply(backend, chat(tools=[tool])) == "override"


async def test_model_without_a_template_supports_completions_but_no_chats(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "m.gguf", None)
    async with _running(model, embeddings=False) as (backend, facts):
        assert facts.operations == {Operation.COMPLETION, Operation.TOKENIZE}
        assert (await failure_of(backend, chat())).reason is Reason.UNSUPPORTED_OPERATION
        with fails(Reason.UNSUPPORTED_OPERATION):
            await backend.embed(embedding_pb2.EmbeddingPayload(), CALL)
        prompts = [completion_pb2.PromptInput(text="a")]
        assert await reply(backend, completion_pb2.CompletionPayload(prompts=prompts))


@pytest.mark.parametrize("template", ["{{ 'a' * 2000000000 }}", "{{ ''.__class__.__mro__ }}"])
async def test_hostile_template_fails_the_load_before_the_engine_starts(tmp_path: Path, template: str) -> None:
    # Processes of the test before may still be ending.
    before = own_children(recursive=True)
    backend = _backend(write_gguf(tmp_path / "m.gguf", template))
    with fails(Reason.TEMPLATE_FAILED):
        await backend.start()
    assert not backend.log_lines(10)
    assert [each for each in own_children(recursive=True) if each not in before] == []


async def test_unimportable_library_error_suggests_a_fix(model: Path) -> None:
    backend = _backend(model, {"import_fails": True})
    with fails(Reason.CONNECT_FAILED, "pip install llama-cpp-python", "compiles", "libllama.so"):
        await backend.start()


async def test_load_reports_progress_and_is_not_stalled_while_it_grows(model: Path) -> None:
    backend = _backend(model, {"load_step_seconds": 0.3})
    starting = asyncio.create_task(backend.start())
    seen: set[float | None] = set()
    while not starting.done():
        seen.add(backend.load_progress())
        await asyncio.wait({starting}, timeout=0.02)
    await starting
    assert {0.25, 0.5, 0.75} <= seen
    assert backend.load_progress() is None
    await backend.stop()


async def test_prefill_progress_is_reported_and_a_repeat_hits_the_cache(model: Path) -> None:
    counts = {"token": 0, "prefill": 0}
    call = CallInfo(
        request_id="r1",
        traceparent="",
        on_token=lambda: counts.update(token=counts["token"] + 1),
        on_prefill=lambda: counts.update(prefill=counts["prefill"] + 1),
    )
    switches = {"prefill_seconds_per_token": 0.0005, "seconds_per_token": 0.002}
    async with _running(model, switches, extra_arguments=("--batch-tokens", "64")) as (backend, _):
        text = "x" * 200
        first = [event for frame in await frames_of(backend, chat(text), call) for event in frame]
        of_slot = CallInfo(request_id="r2", traceparent="", cache=CacheUse(slot=0, salt="a"))
        second = await events_of(backend, chat(text), of_slot)
        fresh = CallInfo(request_id="r3", traceparent="", cache=CacheUse(slot=0, fresh=True))
        third = await events_of(backend, chat(text), fresh)
    processed = [event.progress.processed_tokens for event in first if event.HasField("progress")]
    total = len(f"[user]{text}[assistant]") + 1
    assert processed == [64, 128, 192, total]
    assert counts["prefill"] >= 2
    assert counts["token"] >= 2
    receipt = second[-1].finished.receipt
    assert receipt.usage.cached_prompt_tokens == total - 1
    assert first[-1].finished.receipt.usage.cached_prompt_tokens == 0
    assert third[-1].finished.receipt.usage.cached_prompt_tokens == 0
    assert receipt.tokens_per_second > 0
    assert receipt.gpu_time.ToMicroseconds() > 0
    timings = receipt.engine_timings
    assert timings.tokenize_time.ToMicroseconds() > 0
    computed = timings.prefill_time.ToMicroseconds() + timings.decode_time.ToMicroseconds()
    assert abs(computed - receipt.gpu_time.ToMicroseconds()) <= 1


async def test_repeated_prompt_of_an_answer_with_one_token_counts_as_cached(model: Path) -> None:
    """The library evaluates nothing then, and the receipt had no cached tokens."""
    async with _running(model) as (backend, _):
        short = chat("x" * 200, sampling=sampling_pb2.SamplingParams(max_tokens=1))
        usages = [(await events_of(backend, short))[-1].finished.receipt.usage for _ in range(2)]
    assert [usage.cached_prompt_tokens for usage in usages] == [0, usages[0].prompt_tokens - 1]


async def test_cancelled_prefill_frees_the_engine_immediately(model: Path) -> None:
    switches = {"prefill_seconds_per_token": 0.5}
    async with _running(model, switches) as (backend, _):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await frames_of(backend, chat("x" * 400))
        began = asyncio.get_running_loop().time()
        await asyncio.wait({asyncio.create_task(backend.embed(_texts("a"), CALL))}, timeout=5.0)
        assert asyncio.get_running_loop().time() - began < 5.0
        assert backend.process_id is not None
        assert await backend.responds(2.0), "the line is answered while the engine works"


async def test_stop_strings_end_an_answer_and_are_excluded(model: Path) -> None:
    async with _running(model, {"answer": "one two three</s> four"}) as (backend, _):
        events = await events_of(backend, chat(sampling=sampling_pb2.SamplingParams(stop=["zzz", "thr"])))
        assert "".join(event.delta.text for event in events) == "one two "
        reasons = [event.delta.finish_reason for event in events if event.HasField("delta")]
        assert reasons[-1] == event_pb2.FINISH_REASON_STOP
        assert await reply(backend, chat()) == "one two three", "the template's end token ends it too"


async def test_multi_token_characters_are_sent_whole(model: Path) -> None:
    async with _running(model, {"answer": "ä\u2603\U0001f600!"}) as (backend, _):
        events = await events_of(backend, chat())
        texts = [event.delta.text for event in events if event.delta.text]
        assert texts == ["ä", "\u2603", "\U0001f600", "!"]
        cut = await reply(backend, chat(sampling=sampling_pb2.SamplingParams(max_tokens=1)))
        assert cut == "\ufffd"


async def test_parameters_reach_the_library_and_unsupported_ones_yield_warnings(model: Path) -> None:
    async with _running(model, {"echo_sampling": True}) as (backend, _):
        payload = chat(
            sampling=sampling_pb2.SamplingParams(temperature=0.5, top_k=7, logit_bias={5: 1.5}),
            reasoning_effort=chat_pb2.REASONING_EFFORT_HIGH,
            response_format=chat_pb2.ResponseFormat(json_object=True),
        )
        payload.extra_parameters.fields.add(name="typical_p").value.number_value = 0.25
        payload.extra_parameters.fields.add(name="nonsense").value.number_value = 1.0
        frames = await frames_of(backend, payload)
        warned = [event.warning.field for event in frames[0]]
        assert sorted(warned) == ["nonsense", "reasoning_effort"]
        text = "".join(event.delta.text for frame in frames for event in frame)
        assert json.loads(text) == {"temp": 0.5, "top_k": 7, "typical_p": 0.25, "grammar": True}
        assert json.loads(await reply(backend, chat()))["temp"] == 0.8, "what is left out has the library's default"


async def test_unsupported_features_are_rejected_by_name(model: Path) -> None:
    required = chat_pb2.ToolChoice(mode=chat_pb2.ToolChoice.MODE_REQUIRED)
    image = chat_pb2.ContentPart(image=chat_pb2.MediaPart(data=b"x", media_type="image/png"))
    with_image = chat_pb2.ChatPayload(messages=[chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=[image])])
    passed_on = chat()
    passed_on.extra_parameters.fields.add(name="nonsense").value.number_value = 1.0
    unparsed = chat()
    unparsed.extra_parameters.fields.add(name="grammar").value.string_value = "root"
    ids = completion_pb2.PromptInput(tokens=completion_pb2.TokenIds(ids=[1_000_000]))
    refused: list[tuple[Any, str]] = [
        (chat(logprobs=True), "logprobs"),
        (chat(tool_choice=required, tools=[chat_pb2.Tool()]), "tool_choice"),
        (with_image, "messages[0].content"),
        (completion_pb2.CompletionPayload(prompts=[completion_pb2.PromptInput(text="a")], logprobs=1), "logprobs"),
    ]
    by_the_engine: list[tuple[Any, str]] = [
        (completion_pb2.CompletionPayload(prompts=[ids]), "prompt"),
        (chat(response_format=_schema("unsupported")), "response_format"),
        (chat(response_format=_schema("minItems", 10**9)), "response_format: at most 2,000 repetitions"),
        (passed_on, "nonsense"),
        (unparsed, "grammar"),
    ]
    async with _running(model, passthrough="all") as (backend, _):
        for payload, name in refused:
            error = await failure_of(backend, payload)
            assert error.reason is Reason.INVALID_ARGUMENT
            assert error.message.startswith(name)
        for payload, name in by_the_engine:
            error = await failure_of(backend, payload)
            assert error.reason is Reason.BACKEND_REJECTED
            assert error.message.startswith(f"the engine answered 400: {name}")
        with pytest.raises(FieldError):
            await backend.embed(embedding_pb2.EmbeddingPayload(inputs=[ids]), CALL)
        with pytest.raises(FieldError):
            await backend.embed(embedding_pb2.EmbeddingPayload(dimensions=3), CALL)
        assert await reply(backend, chat(response_format=_schema("fine")))


async def test_passed_through_parameter_of_a_wrong_type_does_not_crash_the_engine(model: Path) -> None:
    async with _running(model, passthrough="all") as (backend, _):
        engine = backend.process_id
        for name in ("grammar", "seed", "stop", "logit_bias"):
            payload = chat()
            value = payload.extra_parameters.fields.add(name=name).value
            value.array_value.values.add().object_value.fields.add(name="x").value.bool_value = True
            assert (await failure_of(backend, payload)).reason is Reason.INVALID_ARGUMENT
        assert await reply(backend, chat())
        assert backend.process_id == engine


async def test_library_failure_is_reported_and_the_engine_continues(model: Path) -> None:
    async with _running(model, {"decode_fails": True}) as (backend, _):
        for _ in range(2):
            expect_failure(await failure_of(backend, chat()), Reason.BACKEND_ERROR, "llama_decode returned -3")
        assert await backend.embed(_texts("a"), CALL)


async def test_text_longer_than_a_batch_is_not_embedded(model: Path) -> None:
    async with _running(model, extra_arguments=("--batch-tokens", "64")) as (backend, _):
        with fails(Reason.CONTEXT_LENGTH_EXCEEDED):
            await backend.embed(_texts("a", "x" * 64), CALL)
        assert len((await backend.embed(_texts("a", "b"), CALL)).embeddings) == 2


def _texts(*texts: str) -> embedding_pb2.EmbeddingPayload:
    return embedding_pb2.EmbeddingPayload(inputs=[completion_pb2.PromptInput(text=text) for text in texts])
