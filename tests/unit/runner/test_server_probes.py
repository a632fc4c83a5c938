"""Probes of a server that its models share: one at a time, and none while a result is young enough."""

import asyncio

import pytest

from runner_svc.openai_upstream.probe import list_of
from runner_svc.openai_upstream.server_probes import SHARED_AGE, ServerProbe, ServerProbes
from runner_svc.policy.model_names import ListedModels
from weft_testing.fake_clock import FakeClock

INTERVAL_SECONDS = 10.0
MAX_AGE = INTERVAL_SECONDS * SHARED_AGE


class Server:
    def __init__(self) -> None:
        self.probes = 0
        self.is_slow = False
        self.answers = asyncio.Event()

    async def probe(self) -> ServerProbe:
        self.probes += 1
        if self.is_slow:
            await self.answers.wait()
        return ServerProbe(status=self.probes)


async def test_models_probing_at_different_times_share_one_probe_per_interval() -> None:
    clock, server = FakeClock(), Server()
    probes = ServerProbes(clock)
    seen: dict[int, list[int | None]] = {model: [] for model in range(5)}
    for _ in range(10):
        for results in seen.values():
            results.append((await probes.latest("u", "", MAX_AGE, server.probe)).status)
            await clock.advance(INTERVAL_SECONDS / len(seen))
    assert server.probes <= 12
    # No model takes one result for two probes in a row: failures are counted.
    assert all(len(set(results)) == len(results) for results in seen.values())


async def test_concurrent_callers_share_a_probe_started_after_their_call() -> None:
    clock, server = FakeClock(), Server()
    probes, server.is_slow = ServerProbes(clock), True
    calls = [asyncio.create_task(probes.latest("u", "", 0.0, server.probe)) for _ in range(5)]
    await asyncio.sleep(0)
    server.answers.set()
    assert [(await call).status for call in calls] == [1] * 5
    await clock.advance(0.001)
    assert (await probes.latest("u", "", 0.0, server.probe)).status == 2


async def test_different_addresses_and_keys_have_separate_probes() -> None:
    server = Server()
    probes = ServerProbes(FakeClock())
    found = [await probes.latest(url, key, MAX_AGE, server.probe) for url in "ab" for key in ("", "k")]
    assert [each.status for each in found] == [1, 2, 3, 4]


async def test_cancelled_caller_does_not_cancel_the_shared_probe() -> None:
    server = Server()
    probes, server.is_slow = ServerProbes(FakeClock()), True
    first, second = (asyncio.create_task(probes.latest("u", "", MAX_AGE, server.probe)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    server.answers.set()
    assert (await second).status == 2
    assert first.cancelled()


@pytest.mark.parametrize(
    ("probe", "why"),
    [
        (ServerProbe(why="it does not answer"), "it does not answer"),
        (ServerProbe(status=401), "it refuses the key (status 401)"),
        (ServerProbe(status=404, health=200), "it has no list of models (status 404)"),
        (ServerProbe(status=200, listed=ListedModels(names=(), is_list=False)), "its answer is not a list of models"),
        (ServerProbe(status=200, why="its answer is longer than 8 MiB"), "its answer is longer than 8 MiB"),
        (ServerProbe(status=200, listed=ListedModels(names=("m",))), ""),
    ],
)
def test_shared_probe_reports_why_no_models_are_known(probe: ServerProbe, why: str) -> None:
    assert list_of(probe).why == why
    assert (list_of(probe).models is None) is bool(why)


def test_server_without_a_model_list_is_online_if_its_health_check_passes() -> None:
    assert ServerProbe(status=404, health=200).presence == 200
    assert ServerProbe(status=404, health=None).presence is None
    assert ServerProbe(status=503).presence == 503
