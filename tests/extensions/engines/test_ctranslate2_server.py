"""The CTranslate2 backend with its real server process, over a stand-in for the library."""

import asyncio
import json
import os
import signal
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conformance_subject import BY_NAME, findings_of, subject
from hosted_stage import SWITCHES, model_folder, scripted
from kit.engine_settings import engine_settings
from kit.engines import CALL, cached_tokens, chat, events_of, frames_of, reply, started, told_lines
from kit.failures import fails
from runner_harness import ready_runner

from runner_svc.backend.port import BackendFacts, CacheUse, LoadOrder
from runner_svc.environments.folder import EnvironmentFolder
from runner_svc.instance.instance_settings import ServedModel
from weft.api.common.v1 import chat_pb2, completion_pb2, embedding_pb2, event_pb2, sampling_pb2
from weft.api.registry.v1 import lease_pb2
from weft.dispatch.frames import has_content
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation
from weft_extensions.engines.ctranslate2.ctranslate2_backend import CTranslate2Backend
from weft_extensions.engines.ctranslate2.runtime import CTranslate2Model
from weft_extensions.engines.library_server import program_command
from weft_testing.conformance.backend import BackendConformance, Engine
from weft_testing.conformance.findings import Verdict

SERVER_PROGRAM = "weft_extensions.engines.ctranslate2.server"

pytestmark = pytest.mark.slow("starts engine processes")

FRESH = replace(CALL, cache=CacheUse(fresh=True))


def _folder(folder: Path, **left_out: bool) -> Path:
    return model_folder(folder, "model.bin", {"bos_token": "<s>", "eos_token": "</s>"}, **left_out)


def _backend(model: Path, switches: dict[str, Any] | None = None, **settings: Any) -> CTranslate2Backend:
    given = {"path": model, "command": program_command(SERVER_PROGRAM), **settings}
    return CTranslate2Backend(*engine_settings(CTranslate2Model, **scripted("SCRIPTED_CTRANSLATE2", switches, **given)))


@pytest.mark.nightly("same checks as test_llama_cpp_python_server")
class TestCTranslate2OverAScriptedLibrary(BackendConformance):
    @pytest.fixture(autouse=True)
    def _model(self, tmp_path: Path) -> None:
        self._tmp_path = tmp_path

    def make_variant(self) -> Path:
        return _folder(self._tmp_path / "variant")

    def make_backend(self, engine: Engine) -> CTranslate2Backend:
        model = self._tmp_path / "model"
        if not model.exists():
            _folder(model)
        return _backend(model, SWITCHES[engine], context_tokens=4096 if engine is Engine.SLOW else 1024)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return _folder(tmp_path / "model")


def _running(
    model: Path, switches: dict[str, Any] | None = None, **settings: Any
) -> AbstractAsyncContextManager[tuple[CTranslate2Backend, BackendFacts]]:
    return started(_backend(model, switches, **settings))


def _with_extra(payload: chat_pb2.ChatPayload, **numbers: int) -> chat_pb2.ChatPayload:
    for name, number in numbers.items():
        payload.extra_parameters.fields.add(name=name).value.integer_value = number
    return payload


async def test_prompt_is_the_rendered_template_with_one_bos_token(model: Path) -> None:
    async with _running(model, {"echo_prompt": True}) as (backend, facts):
        assert await reply(backend, chat("hällo")) == "<s>[user]hällo[assistant]"
        prompts = [completion_pb2.PromptInput(text="hi")]
        assert await reply(backend, completion_pb2.CompletionPayload(prompts=prompts)) == "<s>hi"
        ids = completion_pb2.PromptInput(tokens=completion_pb2.TokenIds(ids=[104, 105]))
        assert await reply(backend, completion_pb2.CompletionPayload(prompts=[ids])) == "hi"
    assert facts.operations == {Operation.CHAT, Operation.COMPLETION, Operation.TOKENIZE}


async def test_settings_and_load_order_reach_the_library(model: Path) -> None:
    async with _running(model, device="cuda", compute_type="float16", slots=3) as (backend, facts):
        assert "loaded on cuda as float16, 3 at once" in backend.log_lines(10)
        assert (facts.slots, facts.context_tokens) == (3, 2048)
    backend = _backend(model, device="cuda")
    parameters: dict[str, Any] = {"compute_type": "int16", "context_tokens": 100}
    facts = await backend.start(LoadOrder(parameters=parameters, shares=()))
    try:
        assert "loaded on cpu as int16, 1 at once" in backend.log_lines(10), "no device may be used"
        assert facts.context_tokens == 100
    finally:
        await backend.stop()


async def test_sampling_is_greedy_unless_the_request_sets_parameters(model: Path) -> None:
    greedy = {"top_k": 1, "temperature": 1}
    wanted: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, greedy),
        ({"temperature": 0.0, "top_p": 0.5}, greedy),
        ({"temperature": 0.5}, {"top_k": 0, "temperature": 0.5}),
        ({"top_k": 7}, {"top_k": 7, "temperature": 1.0}),
        ({"top_p": 0.0, "repeat_penalty": 1.5}, {"top_k": 0, "temperature": 1.0}),
    ]
    async with _running(model, {"echo_options": True}) as (backend, _):
        for given, expected in wanted:
            text = await reply(backend, chat(sampling=sampling_pb2.SamplingParams(**given)))
            assert json.loads(text) == expected, given


async def test_beam_search_answers_in_one_piece_and_ignores_sampling_parameters(model: Path) -> None:
    async with _running(model, {"echo_options": True}) as (backend, _):
        sampling = sampling_pb2.SamplingParams(temperature=0.5, top_k=3)
        payload = _with_extra(chat(sampling=sampling, choice_count=2), beam_size=4, patience=2)
        frames = await frames_of(backend, payload)
        assert [event.warning.field for event in frames[0]] == ["temperature", "top_k", "beam_size"]
        deltas = [event.delta for frame in frames for event in frame if event.HasField("delta")]
        assert [json.loads(delta.text)["beams"] for delta in deltas if delta.text] == [4, 4]
        assert [delta.index for delta in deltas] == [0, 1, 0, 1]
        receipt = frames[-1][-1].finished.receipt
        assert receipt.gpu_time.ToNanoseconds() > 0
        assert receipt.tokens_per_second > 0
        assert not receipt.engine_timings.HasField("prefill_time"), "an answer in one piece has no first token"
        assert not receipt.engine_timings.HasField("decode_time")
        with fails(match="must be at most the number of beams, 4"):
            await frames_of(backend, _with_extra(chat(choice_count=5), beam_size=4))
        stop = sampling_pb2.SamplingParams(stop=[" 2"])
        text, end = [
            event.delta
            for event in await events_of(backend, _with_extra(chat(sampling=stop), beam_size=2))
            if event.HasField("delta")
        ]
        assert text.text == '{"beams":'
        assert end.finish_reason == event_pb2.FINISH_REASON_STOP


async def test_unsupported_features_are_rejected_or_warned_about_by_name(model: Path) -> None:
    async with _running(model, passthrough="all") as (backend, _):
        for payload, name in (
            (chat(response_format=chat_pb2.ResponseFormat(json_object=True)), "response_format"),
            (chat(sampling=sampling_pb2.SamplingParams(logit_bias={5: 1.0})), "logit_bias"),
            (chat(sampling=sampling_pb2.SamplingParams(repeat_penalty=0.0)), "repetition_penalty"),
            (_with_extra(chat(), nonsense=1), "nonsense"),
        ):
            with fails(Reason.BACKEND_REJECTED) as refused:
                await frames_of(backend, payload)
            assert refused.value.message.startswith(f"the engine answered 400: {name}")
        with pytest.raises(FieldError, match="logprobs"):
            await frames_of(backend, chat(logprobs=True))
        with fails(Reason.UNSUPPORTED_OPERATION):
            await backend.embed(embedding_pb2.EmbeddingPayload(), CALL)
        assert await reply(backend, chat()), "and the engine goes on"
    async with _running(model) as (backend, _):
        sampling = sampling_pb2.SamplingParams(seed=1, min_p=0.5, logit_bias={5: 1.0})
        frames = await frames_of(backend, _with_extra(chat(sampling=sampling), grammar=1))
        assert sorted(event.warning.field for event in frames[0]) == ["grammar", "logit_bias", "min_p", "seed"]


async def test_cached_prompts_are_counted_by_the_library_and_dropped_by_a_flush(model: Path) -> None:
    async with _running(model) as (backend, _):
        assert await cached_tokens(backend, "hello") == 0
        assert await cached_tokens(backend, "hello") == len("<[user]hello[assistant]") - 1
        assert await cached_tokens(backend, "hello", FRESH) == 0, "another tenant's turn"
        assert await cached_tokens(backend, "hello") > 0
        erased = await backend.erase_cache()
        assert (erased.entry_count, erased.token_count) == (1, len("<[user]hello[assistant]") - 2)
        assert await told_lines(backend, "unloaded", 1)
        assert await cached_tokens(backend, "hello") == 0
        assert await backend.erase_cache(()) == await backend.erase_cache([])


async def test_prompt_cache_memory_is_bounded_even_with_alternating_tenants(model: Path) -> None:
    async with _running(model, extra_arguments=("--prefix-cache-tokens", "200")) as (backend, _):
        for number in range(30):
            await reply(backend, chat(f"{number} " + "x" * 60), FRESH if number % 2 else CALL)
        held = [int(line.split()[1]) for line in backend.log_lines(10_000) if line.startswith("holds: ")]
    assert max(held) <= 200
    assert len(held) > 2


async def test_several_slots_run_in_parallel_and_cache_no_prompts(model: Path) -> None:
    async with _running(model, {"endless": True, "seconds_per_token": 0.01}, slots=2) as (backend, _):
        async with aclosing(backend.generate(chat(), CALL)) as one, aclosing(backend.generate(chat(), CALL)) as other:
            async with asyncio.timeout(20.0):
                for frames in (one, other, one, other):
                    while not has_content(await anext(frames)):
                        pass
        limited = chat(sampling=sampling_pb2.SamplingParams(max_tokens=2))
        for _ in range(2):
            assert (await events_of(backend, limited))[-1].finished.receipt.usage.cached_prompt_tokens == 0
        assert not [line for line in backend.log_lines(1000) if line.startswith("holds: ")]


async def test_cancelled_prefill_frees_the_slot_at_its_first_token(model: Path) -> None:
    async with _running(model, {"prefill_seconds": 0.5}) as (backend, _):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await frames_of(backend, chat())
        assert await backend.responds(5.0), "the channel is answered while the engine works"
        assert await reply(backend, chat())


async def test_missing_library_tokenizer_or_environment_error_suggests_a_fix(tmp_path: Path) -> None:
    backend = _backend(_folder(tmp_path / "model"), {"import_fails": True})
    with fails(match=r"weft runtime install ctranslate2.*libctranslate2\.so"):
        await backend.start()
    backend = _backend(_folder(tmp_path / "other", **{"tokenizer.json": True}))
    with fails(match=r"--copy_files tokenizer\.json"):
        await backend.start()
    backend = _backend(tmp_path / "model", command=None, environments=EnvironmentFolder(tmp_path))
    with fails(Reason.CONNECT_FAILED, match="is not installed; run: weft runtime install ctranslate2"):
        await backend.start()


async def test_server_program_runs_in_the_environment_under_the_home(tmp_path: Path) -> None:
    python = tmp_path / "ctranslate2" / "bin" / "python"
    python.parent.mkdir(parents=True)
    # An interpreter with a prefix of its own would need msgspec there.
    python.write_text(f'#!/bin/sh\nexec {program_command(SERVER_PROGRAM)[0]} "$@"\n')
    python.chmod(0o755)
    environments = EnvironmentFolder(tmp_path)
    async with _running(_folder(tmp_path / "model"), command=None, environments=environments) as (backend, _):
        assert await reply(backend, chat())


async def test_model_sleeps_and_wakes_in_its_process(model: Path) -> None:
    async with _running(model, sleeps_in_place=True) as (backend, facts):
        engine = backend.process_id
        assert await cached_tokens(backend, "hello") == 0
        assert await backend.sleep()
        assert await told_lines(backend, "unloaded", 1)
        assert backend.process_id == engine
        with fails(Reason.BACKEND_NOT_READY):
            await frames_of(backend, chat())
        assert await backend.start() == facts
        assert backend.process_id == engine
        assert await cached_tokens(backend, "hello") == 0, "nothing of before the sleep is left"
        watch = asyncio.create_task(backend.wait_exit())
        await asyncio.sleep(0)
        assert not watch.done()
        os.kill(engine or 0, signal.SIGKILL)
        async with asyncio.timeout(5.0):
            assert (await watch).reason is Reason.SERVER_DIED, "a death after the wake is noticed"


async def test_unload_the_library_refuses_after_an_answer_is_retried(model: Path) -> None:
    async with _running(model, {"refused_unloads": 3}, sleeps_in_place=True) as (backend, _):
        assert await reply(backend, chat())
        assert await backend.sleep()


async def test_engine_that_cannot_sleep_in_place_must_be_stopped(model: Path) -> None:
    async with _running(model) as (backend, _):
        assert not await backend.sleep(), "it is not configured so"
    async with _running(model, {"refused_unloads": 1_000_000}, sleeps_in_place=True) as (backend, _):
        assert not await backend.sleep(), "the library has not freed its memory"
    backend = _backend(model, sleeps_in_place=True)
    assert not await backend.sleep(), "it does not run"
    shares = (lease_pb2.DeviceBytes(device_index=0, bytes=1),)
    await backend.start(LoadOrder(shares=shares))
    try:
        assert not await backend.sleep(), "its memory on a device is only free without its process"
    finally:
        await backend.stop()


@pytest.mark.parametrize(("keeps", "verdict"), [(False, Verdict.HONOURED), (True, Verdict.BROKEN)])
async def test_unload_keeps_the_process_only_if_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps: bool, verdict: Verdict
) -> None:
    monkeypatch.setattr("weft_testing.conformance.runner_suite.GONE_SECONDS", 1.0 if keeps else 10.0)
    backend = _backend(_folder(tmp_path / "model"), sleeps_in_place=True)
    served = ServedModel(name="m", make_backend=lambda: backend, slots=1, unload_keeps_process=keeps)
    async with (
        ready_runner(tmp_path, [served]) as runner,
        subject(runner, f"unix:{tmp_path}/runner.sock") as tested,
    ):
        finding = (await findings_of(tested, (BY_NAME["teardown"],)))["teardown"]
    assert finding.verdict is verdict, finding.detail
