"""Tenants with a limit each, who ask for more than it over all gateways and pools, so that several routers admit it.

What was admitted and what was refused for the limit is written into a history file; other failures are of processes
that were killed, and count as neither.
"""

import asyncio
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from random import Random

import aiohttp

from weft_testing.torture.checker import STREAM_PREFIX
from weft_testing.torture.history import EventFile, Kind
from weft_testing.torture.plan import TENANT_CALLS, Plan
from weft_testing.torture.streams import GatewayAddress

CALL_SECONDS = 60.0
TENANT_HEADER = "X-Tenant-ID"
LIMITED = 429


class TenantCallers:
    """One caller per tenant. `start` begins their chats, `stop` lets those under way end."""

    def __init__(self, plan: Plan, gateways: Sequence[GatewayAddress], file: Path) -> None:
        self._plan = plan
        self._gateways = gateways
        self._path = file
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._numbers = count()

    def start(self) -> None:
        """Begin the chats. Raises OSError when the history file cannot be opened."""
        if not self._plan.tenants:
            return
        self._file = EventFile(self._path, "tenants")
        self._tasks = [asyncio.create_task(self._call(tenant)) for tenant in self._plan.tenant_names]

    async def stop(self) -> None:
        """End after the chats that are under way. Raises what ended a caller."""
        self._stopping.set()
        await asyncio.gather(*self._tasks)

    async def _call(self, tenant: str) -> None:
        random = Random(f"{self._plan.seed}/{tenant}")  # noqa: S311 - the seed must decide it
        pools, rate = self._plan.steady_pools, self._plan.calls_per_second
        running = set[asyncio.Task[None]]()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CALL_SECONDS)) as http:
            while not self._stopping.is_set():
                await asyncio.sleep(random.expovariate(rate))
                gateway, pool = random.choice(self._gateways), random.choice(pools)
                # One that waits for a router that was killed holds up no other.
                if len(running) < TENANT_CALLS:
                    chat = asyncio.create_task(self._chat(http, gateway, tenant, pool))
                    running.add(chat)
                    chat.add_done_callback(running.discard)
            await asyncio.gather(*running)

    async def _chat(self, http: aiohttp.ClientSession, gateway: GatewayAddress, tenant: str, pool: str) -> None:
        # To the checker of tasks it is no task, as a stream.
        request_id = f"{STREAM_PREFIX}of-{tenant}-{next(self._numbers)}"
        body = {"model": pool, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        headers, begun = {"X-Request-Id": request_id, TENANT_HEADER: tenant}, time.time()
        try:
            url = f"{gateway.url}/v1/chat/completions"
            async with http.post(url, json=body, headers=headers) as response:
                await response.read()
                status = response.status
        except (aiohttp.ClientError, TimeoutError):
            return
        if status in (200, LIMITED):
            kind = Kind.ADMITTED if status == 200 else Kind.LIMITED
            self._file.write(kind, asked_at=begun, task=request_id, key=tenant)
