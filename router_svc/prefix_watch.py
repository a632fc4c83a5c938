"""Follows what engines report about the prompt prefixes in their caches, instead of estimating it."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, cast

from router_svc.policy.endpoints.candidates import CandidateKey
from router_svc.policy.endpoints.prefix_affinity import PrefixReport, StoredPrompt
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.api.runner.v1 import runner_service_pb2, runner_service_pb2_grpc
from weft.dispatch.fleet import FleetView
from weft.kernel.channels.rpc import ChannelPool, calling
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import PREFIX_ENDS
from weft.kernel.services.service_lifecycle import start_task, stop_tasks
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock
from weft.kernel.values.address import metadata_of

if TYPE_CHECKING:
    import asyncio

    from weft.api.runner.v1.runner_service_pb2_grpc import RunnerServiceAsyncStub

log = get_logger("weft.prefix_watch")

MAX_FOLLOWED = 1_024
"""Maximum number of engines; the prefixes of others are estimated."""
RETRY_SECONDS = 5.0


class PrefixWatch:
    """One stream for each engine that reports prefixes or stored prompts. While it is broken, they are estimated."""

    def __init__(self, channels: ChannelPool, clock: Clock, note: Callable[[PrefixReport], None]) -> None:
        self._channels = channels
        self._clock = clock
        self._note = note
        self._followed: dict[tuple[CandidateKey, str], asyncio.Task[None]] = {}
        """By engine and address."""
        self._ending: set[asyncio.Task[None]] = set()

    def update_view(self, view: FleetView) -> None:
        """Apply a new view of the registry."""
        wanted = set(islice(_reporting(view), MAX_FOLLOWED))
        for engine in self._followed.keys() - wanted:
            task = self._followed.pop(engine)
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
            self._note(PrefixReport(key=engine[0], restart=True))
        for key, address in wanted - self._followed.keys():
            self._followed[key, address] = start_task(self._follow(key, address), name=f"prefixes-{key[0]}")

    async def stop(self) -> None:
        """End all streams."""
        followed, self._followed = self._followed, {}
        await stop_tasks([*followed.values(), *self._ending])

    async def _follow(self, key: CandidateKey, address: str) -> None:
        while True:
            try:
                with calling(Reason.WORKER_LOST):
                    await self._read(key, address)
            except WeftError as error:
                log.info("prefixes are estimated", model=key[0], runner=key[1], message=error.message)
            self._note(PrefixReport(key=key, restart=True))
            await self._clock.sleep(RETRY_SECONDS)

    async def _read(self, key: CandidateKey, address: str) -> None:
        channel = await self._channels.get(address)
        stub = cast("RunnerServiceAsyncStub", runner_service_pb2_grpc.RunnerServiceStub(channel))
        request = runner_service_pb2.WatchPrefixesRequest(model=key[0])
        metadata = metadata_of(address)
        # An engine would parse, and answer by, what a joined machine sends as the state of a prompt.
        is_movable = not metadata
        async for changes in stub.WatchPrefixes(request, metadata=metadata):
            report = PrefixReport(
                key=key,
                restart=changes.restart,
                cleared=changes.cleared,
                held=tuple(changes.held),
                lost=tuple(changes.lost),
                stored=tuple(_stored(prompt, is_movable=is_movable) for prompt in changes.stored.prompts)
                if changes.HasField("stored")
                else None,
            )
            self._note(report)


def _stored(prompt: runner_service_pb2.StoredPrompt, *, is_movable: bool) -> StoredPrompt:
    seconds = prompt.restore.ToNanoseconds() / 1e9
    digests = tuple(prompt.prefix_digests[: len(PREFIX_ENDS)])
    token_seconds = prompt.token_prefill.ToNanoseconds() / 1e9
    return StoredPrompt(digests, seconds, prompt.byte_count, prompt.state_kind if is_movable else "", token_seconds)


def _reporting(view: FleetView) -> Iterator[tuple[CandidateKey, str]]:
    """Yields the engines that report their prefixes or stored prompts, with the addresses of their runners."""
    for runner in view.runners.values():
        for name, instance in runner.instances.items() if runner.active else ():
            is_reporting = instance.reports_prefixes and instance.phase == InstanceState.PHASE_READY
            if (is_reporting or instance.stores_prompts) and name in view.models:
                yield (name, runner.name, runner.incarnation), runner.address
