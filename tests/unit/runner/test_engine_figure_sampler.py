"""The sampling of an engine's figures, against a server that is only a page, and the report of them."""

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, cast

import pytest
from kit.presence import present
from kit.waiting import until

from runner_svc.runtimes import engine_figures
from runner_svc.runtimes.engine_figures import MAX_FAILED_SAMPLES, FigureSampler, MetricsPage, with_sample_time
from runner_svc.runtimes.llama_server.llama_server_backend import read_load as read_llama
from runner_svc.runtimes.server.presets import OTHER_PROGRAM, PRESETS
from runner_svc.runtimes.server.server_backend import metrics_page_of
from weft.api.registry.v1.runner_pb2 import EngineLoad
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

if TYPE_CHECKING:
    from runner_svc.openai_upstream.client import OpenAiHttp


class Page:
    """A server that answers with what it is set to, and counts how often it is asked."""

    def __init__(self) -> None:
        self.running, self.waiting = 0, 0
        self.status: int | None = 200
        self.asked = 0
        self.in_flight = self.most_in_flight = self.request_count = 0

    async def call_route(self, method: str, path: str, timeout_seconds: float) -> tuple[int, bytes]:
        assert (method, path) == ("GET", "/metrics")
        assert timeout_seconds > 0
        self.asked += 1
        if self.status is None:
            raise WeftError(Reason.CONNECT_FAILED, "no answer")
        text = f"llamacpp:requests_processing {self.running}\nllamacpp:requests_deferred {self.waiting}\n"
        return self.status, text.encode()


@pytest.fixture
def page() -> Page:
    return Page()


@pytest.fixture
async def sampler(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[FigureSampler]:
    monkeypatch.setattr(engine_figures, "SAMPLE_SECONDS", 0.01)
    sampler = FigureSampler()
    yield sampler
    await sampler.end()


def _begin(sampler: FigureSampler, page: Page, **changes: Any) -> None:
    sampler.begin(cast("OpenAiHttp", page), MetricsPage("/metrics", read_llama, **changes))


async def test_engine_without_requests_is_sampled_once(sampler: FigureSampler, page: Page) -> None:
    _begin(sampler, page)
    await until(lambda: sampler.load is not None)
    await asyncio.sleep(0.1)
    assert page.asked == 1
    assert sampler.load == EngineLoad(running_count=0, waiting_count=0)


async def test_engine_is_sampled_while_it_has_requests_and_until_it_reports_none(
    sampler: FigureSampler, page: Page
) -> None:
    _begin(sampler, page)
    await until(lambda: page.asked == 1)
    page.running, page.in_flight = 1, 1
    await until(lambda: sampler.load is not None and sampler.load.running_count == 1)
    assert sampler.load is not None
    assert not sampler.load.HasField("other_count"), "nobody else can reach it"
    page.running, page.in_flight = 0, 0
    await until(lambda: sampler.load is not None and not sampler.load.HasField("sample_time"))


async def test_other_requests_are_those_not_sent_by_the_runner(sampler: FigureSampler, page: Page) -> None:
    page.running, page.waiting, page.in_flight, page.most_in_flight = 5, 2, 3, 3
    _begin(sampler, page, has_others=True)
    await until(lambda: sampler.load is not None)
    assert sampler.load is not None
    assert sampler.load.other_count == 4


async def test_recently_ended_request_is_not_counted_as_one_of_others(sampler: FigureSampler, page: Page) -> None:
    page.running, page.in_flight, page.most_in_flight = 1, 0, 1
    _begin(sampler, page, has_others=True)
    await until(lambda: sampler.load is not None)
    assert sampler.load is not None
    assert sampler.load.other_count == 0
    await until(lambda: sampler.load is not None and sampler.load.other_count == 1)  # it runs on: another's


async def test_figures_are_dropped_after_several_failed_samples(sampler: FigureSampler, page: Page) -> None:
    _begin(sampler, page, has_others=True)
    await until(lambda: sampler.load is not None)
    page.status, page.asked = None, 0
    await until(lambda: sampler.load is None)
    assert page.asked >= MAX_FAILED_SAMPLES
    page.status = 200
    await until(lambda: sampler.load is not None)


@pytest.mark.parametrize("status", [401, 404, 501])
async def test_metrics_page_missing_on_the_server_is_not_requested_again(
    sampler: FigureSampler, page: Page, status: int
) -> None:
    page.status = status
    _begin(sampler, page, has_others=True)
    await until(lambda: page.asked == 1)
    await asyncio.sleep(0.1)
    assert (page.asked, sampler.load) == (1, None)


async def test_sampler_is_idle_without_a_metrics_page_and_after_its_end(sampler: FigureSampler, page: Page) -> None:
    sampler.begin(cast("OpenAiHttp", page), None)
    await sampler.end()
    _begin(sampler, page, has_others=True)
    await until(lambda: sampler.load is not None)
    await sampler.end()
    asked = page.asked
    await asyncio.sleep(0.1)
    assert (page.asked, sampler.load) == (asked, None)


def test_cached_tokens_of_llama_cpp_are_derived_from_the_queried_ones() -> None:
    page = "llamacpp:prompt_tokens_total 50\nllamacpp:prompt_tokens_cached_total 96\nllamacpp:requests_processing 2\n"
    assert read_llama(page) == EngineLoad(running_count=2, prefix_query_tokens=146, prefix_hit_tokens=96)
    assert read_llama("llamacpp:prompt_tokens_total 50\nllamacpp:kv_cache_usage_ratio 0.9\n") == EngineLoad(), (
        "an older server counts idle prompts in its share, and no cached tokens"
    )


@pytest.mark.parametrize(
    ("preset", "text", "load"),
    [
        (
            "sglang",
            'sglang:num_running_reqs{a="b"} 3\nsglang:num_queue_reqs 1.0\nsglang:token_usage 0.456\n',
            EngineLoad(running_count=3, waiting_count=1, kv_cache_share=0.46),
        ),
        ("tgi", "tgi_batch_current_size 4\ntgi_queue_size 2\n", EngineLoad(running_count=4, waiting_count=2)),
        (
            "lmdeploy",
            "lmdeploy:num_requests_running 1\nlmdeploy:num_requests_waiting 0\nlmdeploy:gpu_cache_usage_perc 0.9\n",
            EngineLoad(running_count=1, waiting_count=0),
        ),
    ],
)
def test_metrics_of_a_preset_are_read_by_name(preset: Any, text: str, load: EngineLoad) -> None:
    found = present(metrics_page_of(PRESETS[preset]))
    assert found.read(text) == load


def test_program_without_known_metrics_has_no_metrics_page() -> None:
    assert metrics_page_of(OTHER_PROGRAM) is None
    assert metrics_page_of(PRESETS["ollama"]) is None


@pytest.mark.parametrize(
    "load",
    [EngineLoad(running_count=1), EngineLoad(waiting_count=2), EngineLoad(kv_cache_share=0.5)],
    ids=["it computes", "requests wait", "its cache is used, and nothing else is known"],
)
def test_figures_of_a_busy_engine_have_a_sample_time_in_steps(load: EngineLoad) -> None:
    first, later, next_step = (with_sample_time(load, at) for at in (1000.0, 1009.9, 1010.0))
    assert first.sample_time.seconds == 1000
    assert first == later
    assert next_step != first
    first.ClearField("sample_time")
    assert first == load, "nothing else changes"


@pytest.mark.parametrize("load", [EngineLoad(), EngineLoad(running_count=0, waiting_count=0, kv_cache_share=0.9)])
def test_figures_of_an_idle_engine_have_no_sample_time(load: EngineLoad) -> None:
    assert not with_sample_time(load, 1000.0).HasField("sample_time")
