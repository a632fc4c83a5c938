"""What GET /api/v1/watch costs a gateway of a large mesh: `python -m bench.watches`.

CPU time and bytes of opening a stream of models, runners and pools, the first and a second one, and of each change. The
registry is a script in the same process, so that what is measured is the gateway alone, without its HTTP framing.
"""

import argparse
import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, cast

from gateway.watch.resources import resource_sources
from gateway.watch.source import WatchCaller
from gateway.watch.stream import WatchLimits, WatchStream
from weft.api.registry.v1.model_pb2 import MODEL_OPERATION_CHAT, Model, ModelManifest
from weft.api.registry.v1.registry_service_pb2 import Change, Snapshot, WatchedRunner, WatchResponse
from weft.api.registry.v1.runner_pb2 import Capability, InstanceState, Runner
from weft.kernel.clock import SystemClock
from weft.kernel.principal import LOCAL

if TYPE_CHECKING:
    from gateway.ports import RegistryPort

KINDS = ("model", "runner", "pool")
MODELS_PER_RUNNER = 10
LIMITS = WatchLimits(max_names=4096, interval_seconds=0.1)


class ScriptedRegistry:
    """A mesh of models; `change` gives one of its runners another report."""

    def __init__(self, models: int) -> None:
        self._names = [f"model-{each:04}" for each in range(models)]
        self._changes = asyncio.Queue[WatchResponse]()

    def change(self, number: int) -> None:
        """One runner reports another number of used slots of each of its models."""
        runners = len(self._names) // MODELS_PER_RUNNER
        watched = WatchedRunner(runner=self._runner(number % runners, used=number))
        self._changes.put_nowait(WatchResponse(revision=number + 2, change=Change(runner=watched)))

    async def watch(self) -> AsyncGenerator[WatchResponse]:
        """See RegistryPort."""
        models = [
            Model(
                manifest=ModelManifest(name=name, operations=[MODEL_OPERATION_CHAT], context_tokens=8192),
                runner=f"runner-{each // MODELS_PER_RUNNER:03}",
                status=Model.STATUS_ACTIVE,
            )
            for each, name in enumerate(self._names)
        ]
        runners = [WatchedRunner(runner=self._runner(each)) for each in range(len(models) // MODELS_PER_RUNNER)]
        yield WatchResponse(revision=1, snapshot=Snapshot(models=models, runners=runners))
        while True:
            yield await self._changes.get()

    def _runner(self, number: int, used: int = 0) -> Runner:
        names = self._names[number * MODELS_PER_RUNNER :][:MODELS_PER_RUNNER]
        instances = [
            InstanceState(model=name, phase=InstanceState.PHASE_READY, slots_total=8, slots_used=used % 9)
            for name in names
        ]
        return Runner(
            name=f"runner-{number:03}",
            host=f"host-{number:03}",
            runtime="vllm",
            status=Runner.STATUS_ACTIVE,
            capability=Capability(instances=instances),
        )


class Reader:
    """Reads one stream, and counts its bytes."""

    def __init__(self, sources: Sequence[Any]) -> None:
        caller = WatchCaller(principal=LOCAL, tenant="default")
        wanted = [source for source in sources if source.kind in KINDS]
        self._stream = WatchStream(wanted, caller, LIMITS, SystemClock())
        self.size, self.synced = 0, 0
        self.news = asyncio.Event()

    async def run(self) -> None:
        """Read until it is cancelled."""
        async with aclosing(self._stream.writes()) as writes:
            async for data in writes:
                self.size += len(data)
                self.synced += data.count(b'"synced"')
                self.news.set()

    async def until_synced(self) -> None:
        """Return once all kinds are there."""
        while self.synced < len(KINDS):
            self.news.clear()
            await self.news.wait()


async def _opened(sources: Sequence[Any], label: str, running: list[asyncio.Task[None]]) -> Reader:
    reader, before = Reader(sources), time.process_time()
    running.append(asyncio.create_task(reader.run()))
    await reader.until_synced()
    print(f"{label}: {reader.size / 1e6:.2f} MB, {(time.process_time() - before) * 1000:.0f} ms CPU")
    return reader


async def _measure(models: int, changes: int) -> None:
    registry, running = ScriptedRegistry(models), list[asyncio.Task[None]]()
    sources = resource_sources(cast("RegistryPort", registry))
    first = await _opened(sources, f"the first stream of {models:,} models", running)
    await _opened(sources, "a second stream", running)
    before, size = time.process_time(), first.size
    for each in range(changes):
        registry.change(each)
        await asyncio.sleep(0.002)
    await asyncio.sleep(2 * LIMITS.interval_seconds)
    used = (time.process_time() - before) * 1000 / changes
    per_stream = (first.size - size) / changes
    print(
        f"one report of a runner with {MODELS_PER_RUNNER} models, to two streams: {used:.2f} ms CPU, "
        f"{per_stream / 1000:.1f} kB to each"
    )
    for task in running:
        task.cancel()
    await asyncio.wait(running)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.watches", description=__doc__)
    parser.add_argument("--models", type=int, default=1_000)
    parser.add_argument("--changes", type=int, default=500)
    options = parser.parse_args(arguments)
    asyncio.run(_measure(options.models, options.changes))


if __name__ == "__main__":
    main()
