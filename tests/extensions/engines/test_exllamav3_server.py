"""The ExLlamaV3 backend with its real server process, over a stand-in for the library: never on a GPU."""

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hosted_stage import SWITCHES, model_folder, scripted
from kit.engine_settings import engine_settings
from kit.engines import CALL, cached_tokens, chat, events_of, frames_of, reply, started, told_lines
from kit.failures import fails
from kit.one_model import OneModelCache
from library_signatures import text_of
from record_exllamav3 import CALLED, RECORD

from runner_svc.backend.port import BackendFacts, CacheIsolation, CacheUse, CallInfo, LoadOrder
from runner_svc.environments.folder import EnvironmentFolder
from weft.api.common.v1 import chat_pb2, completion_pb2, embedding_pb2, event_pb2, json_value_pb2, sampling_pb2
from weft.dispatch.frames import Frame, has_content
from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation
from weft_extensions.engines.exllamav3.exllamav3_backend import ExllamaV3Backend
from weft_extensions.engines.exllamav3.runtime import ENVIRONMENT, ExllamaV3Model
from weft_extensions.engines.library_server import program_command
from weft_testing.conformance.backend import BackendConformance, Engine

SERVER_PROGRAM = "weft_extensions.engines.exllamav3.server"

pytestmark = pytest.mark.nightly("an engine in a process, as in test_ctranslate2_server")

ENDS_LOOPS = replace(CALL, ends_loops=True)


def _folder(folder: Path, **left_out: bool) -> Path:
    return model_folder(folder, "model.safetensors", {"architectures": ["LlamaForCausalLM"]}, **left_out)


def _backend(model: Path, switches: dict[str, Any] | None = None, **settings: Any) -> ExllamaV3Backend:
    given = {"path": model, "command": program_command(SERVER_PROGRAM), **settings}
    return ExllamaV3Backend(*engine_settings(ExllamaV3Model, **scripted("SCRIPTED_EXLLAMAV3", switches, **given)))


class TestExllamaV3OverAScriptedLibrary(BackendConformance):
    @pytest.fixture(autouse=True)
    def _model(self, tmp_path: Path) -> None:
        self._tmp_path = tmp_path

    def make_variant(self) -> Path:
        return _folder(self._tmp_path / "variant")

    def make_backend(self, engine: Engine) -> ExllamaV3Backend:
        model = self._tmp_path / "model"
        if not model.exists():
            _folder(model)
        slow = engine is Engine.SLOW
        return _backend(model, SWITCHES[engine], context_tokens=4096 if slow else 1024, slots=1 if slow else 4)


class TestExllamaV3KeepsTenantsApart(OneModelCache):
    slots = 1
    """The pages of one tenant and tag at a time: see CacheTurns."""
    embeds = False
    counts_flushed = False

    @pytest.fixture(autouse=True)
    def _model(self, tmp_path: Path) -> None:
        self._folder = _folder(tmp_path / "model")
        # A first token that all prompts share would be found in a tenant's own other prompts.
        (self._folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))

    def make_backend(self) -> ExllamaV3Backend:
        return _backend(self._folder, {"seconds_per_token": 0.01}, context_tokens=2048, slots=3)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return _folder(tmp_path / "model")


def _running(
    model: Path, switches: dict[str, Any] | None = None, **settings: Any
) -> AbstractAsyncContextManager[tuple[ExllamaV3Backend, BackendFacts]]:
    return started(_backend(model, switches, **settings))


def _sampled(text: str = "hi", **sampling: Any) -> chat_pb2.ChatPayload:
    return chat(text, sampling=sampling_pb2.SamplingParams(**sampling))


def _with_extra(payload: chat_pb2.ChatPayload, **values: int | str | list[str]) -> chat_pb2.ChatPayload:
    for name, value in values.items():
        field = payload.extra_parameters.fields.add(name=name).value
        if isinstance(value, int):
            field.integer_value = value
        elif isinstance(value, str):
            field.string_value = value
        else:
            field.array_value.values.extend(json_value_pb2.JsonValue(string_value=text) for text in value)
    return payload


def _of(salt: str) -> CallInfo:
    return replace(CALL, cache=CacheUse(salt=salt))


def _at_work(backend: ExllamaV3Backend) -> list[int]:
    lines = [line for line in backend.log_lines(100_000) if line.startswith("at work: ")]
    return [int(line.split()[-1]) for line in lines]


async def _first_content(frames: AsyncGenerator[Frame]) -> None:
    async with asyncio.timeout(20.0):
        while not has_content(await anext(frames)):
            pass


async def test_prompt_begins_with_a_bos_token_unless_the_tokenizer_adds_none(model: Path) -> None:
    prompt = completion_pb2.CompletionPayload(prompts=[completion_pb2.PromptInput(text="hi")])
    async with _running(model, {"echo_prompt": True}) as (backend, facts):
        assert await reply(backend, prompt) == "<s>hi"
    assert facts.operations == {Operation.CHAT, Operation.COMPLETION, Operation.TOKENIZE}
    (model / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
    async with _running(model, {"echo_prompt": True}) as (backend, _):
        assert await reply(backend, prompt) == "hi"


async def test_settings_and_load_order_reach_the_library(model: Path) -> None:
    settings: dict[str, Any] = {
        "cache_tokens": 8192,
        "cache_quant": "4,6",
        "gpu_split": (20.5, 24),
        "tensor_parallel": True,
        "slots": 3,
        "extra_arguments": ("--tp-backend", "nccl", "--chunk-tokens", "512", "--step-tokens", "3"),
    }
    async with _running(model, **settings) as (backend, facts):
        lines = backend.log_lines(10)
        assert 'cache: 8192 tokens, {"k_bits": 4, "v_bits": 6}' in lines
        assert "generator: 3 at once, chunks of 512, 3 per step" in lines
        (load,) = [json.loads(line.removeprefix("load: ")) for line in lines if line.startswith("load: ")]
        assert load == {
            "max_batch_size": 3,
            "max_chunk_size": 512,
            "tensor_p": True,
            "tp_backend": "nccl",
            "use_per_device": [20.5, 24.0],
        }
        assert (facts.slots, facts.context_tokens) == (3, 2048)
    backend = _backend(model, cache_quant="4")
    parameters: dict[str, Any] = {"cache_quant": "16", "context_tokens": 100}
    facts = await backend.start(LoadOrder(parameters=parameters))
    try:
        assert "cache: 1024 tokens, {}" in backend.log_lines(10), "a page for each of four slots"
        assert facts.context_tokens == 100
        assert backend.load_progress() is None
    finally:
        await backend.stop()
    with pytest.raises(WeftError, match=r"parameters\.cache_tokens: must be a multiple of 256"):
        await backend.start(LoadOrder(parameters={"cache_tokens": 300}))


async def test_parameters_are_renamed_for_the_library(model: Path) -> None:
    async with _running(model, {"echo_options": True}, extra_arguments=("--requeue-tokens", "512")) as (backend, _):
        assert json.loads(await reply(backend, chat())) == {"rq": 512, "banned": []}
        payload = _sampled(temperature=0.5, top_k=-1, repeat_penalty=1.5, frequency_penalty=0.5, seed=7)
        told = json.loads(await reply(backend, _with_extra(payload, banned_strings=["as an AI"], min_new_tokens=3)))
        assert told == {
            "temperature": 0.5,
            "top_k": 0,
            "rep_p": 1.5,
            "freq_p": 0.5,
            "seed": 7,
            "rq": 512,
            "banned": ["as an AI"],
            "min_new_tokens": 3,
        }
        biased = json.loads(await reply(backend, _sampled(logit_bias={5: 1.5, 99_999: 1.0})))
        assert biased["logit_bias"] == {"5": 1.5}, "a token that the model does not have is left out"
        schema = chat_pb2.ResponseFormat(json_object=True)
        assert json.loads(await reply(backend, chat(response_format=schema))) == [
            "json_schema",
            '{"type": "object"}',
        ]
        constrained = _with_extra(chat(), grammar='root ::= "a"')
        assert json.loads(await reply(backend, constrained)) == ["gbnf_grammar", 'root ::= "a"']


async def test_unsupported_features_are_rejected_by_name_and_the_engine_continues(model: Path) -> None:
    async with _running(model, passthrough="all") as (backend, _):
        for payload, name in (
            (_sampled(repeat_penalty=0.0), "rep_p"),
            (_with_extra(chat(), nonsense=1), "nonsense"),
            (_with_extra(chat(), grammar="wrong"), "grammar: Invalid grammar"),
        ):
            with fails(Reason.BACKEND_REJECTED) as refused:
                await frames_of(backend, payload)
            assert refused.value.message.startswith(f"the engine answered 400: {name}")
        with pytest.raises(FieldError, match="logprobs"):
            await frames_of(backend, chat(logprobs=True))
        with fails(Reason.UNSUPPORTED_OPERATION):
            await backend.embed(embedding_pb2.EmbeddingPayload(), CALL)
        with fails(Reason.CONTEXT_LENGTH_EXCEEDED):
            await frames_of(backend, chat("x" * 5000))
        assert await reply(backend, chat()), "and the engine goes on"


async def test_answers_end_at_stop_strings_the_token_limit_and_the_end_token(model: Path) -> None:
    async with _running(model, {"answer": "The sea is calm."}) as (backend, _):
        for sampling, text, reason in (
            ({}, "The sea is calm.", event_pb2.FINISH_REASON_STOP),
            ({"stop": [" is"]}, "The sea", event_pb2.FINISH_REASON_STOP),
            ({"max_tokens": 7}, "The sea", event_pb2.FINISH_REASON_LENGTH),
            # The library does not look for a stop string that ends with the last token.
            ({"max_tokens": 10, "stop": [" is"]}, "The sea", event_pb2.FINISH_REASON_STOP),
        ):
            events = await events_of(backend, _sampled(**sampling))
            deltas = [event.delta for event in events if event.HasField("delta")]
            assert "".join(delta.text for delta in deltas) == text
            assert deltas[-1].finish_reason == reason
        usage = events[-1].finished.receipt.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len("<[user]hi[assistant]"), 10)


async def test_loop_detected_by_the_library_ends_the_answer_with_the_weft_reason(model: Path) -> None:
    looping = {"endless": True, "answer": "again and "}
    async with _running(model, looping, extra_arguments=("--loop-tokens", "64", "--loop-repeats", "4")) as (backend, _):
        with fails(Reason.REPEATED_LINE_LOOP, match="its last 64 tokens are at least 4 times the same"):
            await frames_of(backend, chat(), ENDS_LOOPS)
        tolerated = await events_of(backend, _sampled(max_tokens=200))
        assert tolerated[-1].finished.receipt.usage.completion_tokens == 200, "the policy is not to kill"
    async with _running(model, looping, extra_arguments=("--loop-tokens", "0")) as (backend, _):
        unwatched = await events_of(backend, _sampled(max_tokens=200), ENDS_LOOPS)
        assert unwatched[-1].finished.receipt.usage.completion_tokens == 200


async def test_requests_of_one_tenant_run_in_parallel_and_share_prefixes(model: Path) -> None:
    async with _running(model, {"endless": True, "seconds_per_token": 0.01}, slots=3) as (backend, _):
        async with aclosing(backend.generate(chat(), CALL)) as one, aclosing(backend.generate(chat(), CALL)) as other:
            for frames in (one, other, one, other):
                await _first_content(frames)
        assert max(_at_work(backend)) == 2
        limited = _sampled("hi", max_tokens=2)
        assert (await events_of(backend, limited))[-1].finished.receipt.usage.cached_prompt_tokens > 0


async def test_tenants_take_turns_and_never_share_pages(model: Path) -> None:
    async with _running(model) as (backend, _):
        assert backend.cache_isolation is CacheIsolation.SALT
        assert await cached_tokens(backend, "hello", _of("a")) == 0
        assert await cached_tokens(backend, "hello", _of("a")) == len("<[user]hello[assistant]") - 1
        assert await cached_tokens(backend, "hello", _of("b")) == 0, "another tenant's turn"
        assert await cached_tokens(backend, "hello", _of("a")) == 0, "and back"
    switches = {"answer": "x" * 60, "seconds_per_token": 0.005}
    async with _running(model, switches) as (backend, _):
        salts = ["a", "a", "b", "c", "d"]
        async with asyncio.timeout(20.0):
            answers = await asyncio.gather(*(events_of(backend, chat("hello"), _of(salt)) for salt in salts))
        told = [events[-1].finished.receipt.usage.cached_prompt_tokens for events in answers]
        assert told == [0] * len(salts), "those who shared the cache began together"
        renewed = [line for line in backend.log_lines(10_000) if line.startswith("generator: ")]
        # Those of one tenant arrive together or apart.
        assert len(renewed) in (4, 5)
        assert max(_at_work(backend)) <= 2


async def test_request_waiting_for_another_tenant_reports_it_and_can_be_cancelled(model: Path) -> None:
    async with _running(model, {"endless": True, "seconds_per_token": 0.01}) as (backend, _):
        async with aclosing(backend.generate(chat(), _of("a"))) as running:
            await _first_content(running)
            reported = asyncio.Event()
            waiting = asyncio.create_task(events_of(backend, chat(), replace(_of("b"), on_prefill=reported.set)))
            async with asyncio.timeout(5.0):
                await reported.wait()
            waiting.cancel()
            await asyncio.wait({waiting})
            await _first_content(running)
        limited = _sampled(max_tokens=2)
        assert await reply(backend, limited, _of("b")), "the place of the one that gave up is free"


async def test_prefill_progress_is_reported_and_a_cancelled_prefill_is_cancelled_in_the_library(model: Path) -> None:
    chunks = ("--chunk-tokens", "256")
    slow = {"seconds_per_chunk": 0.05}
    async with _running(model, slow, extra_arguments=chunks, context_tokens=8192) as (backend, _):
        async with aclosing(backend.generate(chat("x" * 5000), CALL)) as frames:
            async with asyncio.timeout(20.0):
                reports = [(await anext(frames))[0].progress for _ in range(2)]
        assert [report.processed_tokens for report in reports] == [256, 512]
        assert {report.prompt_tokens for report in reports} == {5000 + len("<[user][assistant]")}
        line = (await told_lines(backend, "cancelled after", 1))[0]
        done, written = map(int, re.findall(r"\d+", line)[::2])
        assert done < 4000
        assert written == 0
        assert await reply(backend, chat()), "and the engine goes on"


async def test_generator_crash_ends_the_process_with_its_error(model: Path) -> None:
    async with _running(model, {"breaks_at_token": 3}) as (backend, _):
        with fails(Reason.SERVER_DIED):
            await frames_of(backend, chat())
        assert any("illegal memory access" in line for line in backend.log_lines(100))


async def test_load_without_cuda_is_rejected_with_the_cause(tmp_path: Path) -> None:
    for switches, cause in (
        ({"import_fails": True}, r"weft runtime install exllamav3.*OSError: CUDA_HOME environment variable is not set"),
        ({"without_device": True}, "no CUDA device is available"),
    ):
        backend = _backend(_folder(tmp_path / str(len(cause))), switches)
        with fails(Reason.CONNECT_FAILED, match=cause):
            await backend.start()
    backend = _backend(_folder(tmp_path / "third"), command=None, environments=EnvironmentFolder(tmp_path))
    with pytest.raises(WeftError, match="is not installed; run: weft runtime install exllamav3"):
        await backend.start()


async def test_folder_that_is_no_model_is_reported(tmp_path: Path) -> None:
    backend = _backend(_folder(tmp_path / "model", **{"config.json": True}))
    with pytest.raises(WeftError, match=r"is not a model of ExLlamaV3: .*config\.json"):
        await backend.start()


def test_recorded_signatures_match_the_pinned_version() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    (pinned,) = re.findall(r"^exllamav3==([0-9.]+)", (ENVIRONMENT.folder / "cuda.in").read_text(), re.MULTILINE)
    assert record["version"] == pinned
    assert set(record["signatures"]) == {f"{name}.{each}" for name, methods in CALLED.items() for each in methods}
    assert text_of(record) == RECORD.read_text(encoding="utf-8")
