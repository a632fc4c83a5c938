"""The asynchronous part of the stand-in: one task takes steps of the generator and hands out the results."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from exllamav3 import Generator, Job
from exllamav3.recorded import signature_of


class AsyncGenerator:
    def __init__(self, *arguments: Any, **named: Any) -> None:
        signature_of("AsyncGenerator.__init__").bind(self, *arguments, **named)
        self.generator = Generator(*arguments, **named)
        self.jobs: dict[Job, AsyncJob] = {}
        self.error: Exception | None = None
        self._has_work = asyncio.Event()
        self._working = asyncio.create_task(self._work())

    def enqueue(self, running: "AsyncJob") -> None:
        if self.error is not None:
            running.queue.put_nowait(self.error)
            return
        self.generator.enqueue(running.job)
        self.jobs[running.job] = running
        self._has_work.set()

    async def cancel(self, running: "AsyncJob") -> None:
        if self.error is None:
            self.generator.cancel(running.job)
        if self.jobs.pop(running.job, None) is not None:
            running.queue.put_nowait(None)

    async def close(self) -> None:
        self._working.cancel()
        await asyncio.gather(self._working, return_exceptions=True)
        for running in self.jobs.values():
            running.queue.put_nowait(None)
        self.generator.close()

    async def _work(self) -> None:
        try:
            while True:
                if not self.jobs:
                    self._has_work.clear()
                    await self._has_work.wait()
                for result in self.generator.iterate():
                    running = self.jobs.get(result["job"])
                    if running is not None:
                        running.queue.put_nowait(result)
                        if result["eos"]:
                            del self.jobs[result["job"]]
                await asyncio.sleep(0)
        except Exception as error:  # noqa: BLE001 - told to every request, as the library does
            self.error = error
            for running in self.jobs.values():
                running.queue.put_nowait(error)
            self.jobs.clear()


class AsyncJob:
    def __init__(self, generator: AsyncGenerator, *arguments: Any, **named: Any) -> None:
        signature_of("AsyncJob.__init__").bind(self, generator, *arguments, **named)
        self.generator = generator
        self.job = Job(*arguments, **named)
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.cancelled = False
        generator.enqueue(self)

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        while not self.cancelled:
            result = await self.queue.get()
            if result is None:
                return
            if isinstance(result, Exception):
                raise result
            yield result
            if result["eos"]:
                return

    async def cancel(self) -> None:
        await self.generator.cancel(self)
        self.cancelled = True
