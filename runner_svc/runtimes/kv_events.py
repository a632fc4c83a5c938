"""KV cache events of vLLM and SGLang: which blocks their prefix caches store and evict, published over ZeroMQ.

Formats are those of vLLM 0.32 (`vllm/distributed/kv_events.py`) and SGLang 0.5.23 (`sglang/srt/disaggregation/
kv_events.py`): three frames (topic, number, batch), the batch in msgpack. A second socket repeats missed batches.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from runner_svc.backend.prefix_reports import PrefixReports
from runner_svc.policy.engine_blocks import BlockEvent, BlockHash, ClearedCache, RemovedBlocks, StoredBlocks
from runner_svc.supervise.socket_folder import SocketFolder
from runner_svc.waiting import end_tasks
from weft.kernel.services.service_lifecycle import start_task, stop_tasks
from weft.kernel.telemetry.log import get_logger
from weft.kernel.text.decoding import DECODE_FAULTS

if TYPE_CHECKING:
    import zmq.asyncio

log = get_logger("weft.kv_events")

FLAG = "--kv-events-config"
TOPIC = b"kv"
MAX_BATCH_BYTES = 16 * 1024 * 1024
"""Larger messages end the connection."""
MAX_TURN_BLOCKS = 4_096
"""Maximum number of blocks that are read before other tasks get the event loop; a few milliseconds."""
MAX_WAITING_BATCHES = 1_000
"""Maximum number of unread batches; the engine drops further ones, which are then requested again."""
REPEATED_BATCHES = 1_000
"""Number of batches that the engine keeps to repeat them."""
REPEAT_SECONDS = 5.0
MAX_MALFORMED = 8
"""After this many invalid messages the reports end."""
NUMBER_BYTES = 8
MAX_ADDRESS_BYTES = 100
"""Operating systems allow at least 104 for the path of a socket."""
_END_NUMBER = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
_ON_DEVICE = (None, "GPU")
"""Names of the cache that prompts are processed in; blocks elsewhere would have to be loaded first."""


class _Stored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    block_size: int
    medium: str | None = None
    group_idx: int | None = None
    session_id: str | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_Stored | _Removed | _Cleared]


_DECODER = msgspec.msgpack.Decoder(_Batch)


class UntrackedCacheError(Exception):
    """The engine's cache has several groups of layers, whose blocks are evicted independently."""


def events_of(batch: bytes) -> list[BlockEvent]:
    """Returns the events of a batch. Raises DECODE_FAULTS, or UntrackedCacheError."""
    found: list[BlockEvent] = []
    for event in _DECODER.decode(batch).events:
        if isinstance(event, _Cleared):
            found.append(ClearedCache())
            continue
        if event.group_idx:
            raise UntrackedCacheError
        if event.medium not in _ON_DEVICE:
            continue
        if isinstance(event, _Removed):
            found += [RemovedBlocks(part) for part in _parts(event.block_hashes)]
        elif event.block_size > 0:
            found += _stored(event)
    return found


def _stored(event: _Stored) -> Iterator[StoredBlocks]:
    parent, request_id = event.parent_block_hash, event.session_id or ""
    for part in _parts(event.block_hashes):
        yield StoredBlocks(hashes=part, parent=parent, token_count=event.block_size, request_id=request_id)
        parent = part[-1]


def _parts(hashes: Sequence[BlockHash]) -> Iterator[Sequence[BlockHash]]:
    return (hashes[start : start + MAX_TURN_BLOCKS] for start in range(0, len(hashes), MAX_TURN_BLOCKS))


def _turns(events: Sequence[BlockEvent]) -> Iterator[list[BlockEvent]]:
    """Yields events in groups of a bounded number of blocks."""
    group: list[BlockEvent] = []
    count = 0
    for event in events:
        size = 0 if isinstance(event, ClearedCache) else len(event.hashes)
        if group and count + size > MAX_TURN_BLOCKS:
            yield group
            group, count = [], 0
        group.append(event)
        count += size
    yield group


def can_follow() -> bool:
    """Whether the library of ZeroMQ is installed."""
    return find_spec("zmq") is not None


def sets_flag(arguments: Sequence[str]) -> bool:
    """Whether a command line publishes events elsewhere, or for several engines, each with its own cache."""
    names = {argument.partition("=")[0] for argument in arguments}
    return bool(names & {FLAG, "--data-parallel-size", "-dp", "--dp-size", "--dp", "--enable-dp-attention"})


def _arguments(folder: Path) -> list[str]:
    """Returns the arguments with which an engine publishes its events on sockets in a folder."""
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": _address(folder),
        "replay_endpoint": _repeat_address(folder),
        "buffer_steps": REPEATED_BATCHES,
        "topic": TOPIC.decode(),
    }
    return [FLAG, msgspec.json.encode(config).decode()]


def _address(folder: Path) -> str:
    return f"ipc://{folder / 'kv'}"


def _repeat_address(folder: Path) -> str:
    return f"ipc://{folder / 'kv-repeat'}"


class BlockEvents:
    """Follows the events of one engine process until it ends. Without them its prefixes are unknown again."""

    def __init__(self, reports: PrefixReports, model: str, folder: SocketFolder) -> None:
        self._reports = reports
        self._model = model
        self._folder = folder
        self._next_number = 0
        self._malformed_count = 0
        self._task: asyncio.Task[None] | None = None
        self.arguments: Sequence[str] = ()
        """Additional arguments of the engine."""

    @classmethod
    async def begin(cls, reports: PrefixReports, model: str) -> Self:
        """Follows an engine that is started next, on sockets that no other user can reach."""
        events = cls(reports, model, await asyncio.to_thread(SocketFolder, "weft-events-"))
        folder = events._folder.path
        if len(_repeat_address(folder).encode()) > MAX_ADDRESS_BYTES:
            log.warning("prefixes are estimated: the path of temporary files is too long", folder=str(folder.parent))
        else:
            events.arguments = _arguments(folder)
            events._task = start_task(events._follow(folder), name="kv-events")
        return events

    async def end(self) -> None:
        """Ends it. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            await stop_tasks([task])
        self._reports.end()
        self._folder.remove()

    async def _follow(self, folder: Path) -> None:
        # Only runners with such an engine need the library.
        import zmq.asyncio  # noqa: PLC0415

        context = zmq.asyncio.Context()
        try:
            events = context.socket(zmq.SUB)
            events.setsockopt(zmq.RCVHWM, MAX_WAITING_BATCHES)
            events.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
            events.setsockopt(zmq.SUBSCRIBE, TOPIC)
            monitor = events.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            events.connect(_address(folder))
            reading = asyncio.ensure_future(self._read(events, context, folder))
            lost = asyncio.ensure_future(_closed(monitor))
            try:
                done, _ = await asyncio.wait({reading, lost}, return_when=asyncio.FIRST_COMPLETED)
                why = done.pop().result()
            finally:
                await end_tasks(reading, lost)
                events.disable_monitor()
            log.warning("prefixes in the engine's cache are estimated again", model=self._model, why=why)
        finally:
            self._reports.end()
            context.destroy(linger=0)

    async def _read(self, events: "zmq.asyncio.Socket", context: "zmq.asyncio.Context", folder: Path) -> str:
        """Reads the engine's events until they can no longer be read; returns the reason."""
        while True:
            frames = await events.recv_multipart()
            number = _number_of(frames)
            if number is not None:
                if number > self._next_number:
                    await self._repeat(context, folder)
                if number < self._next_number:
                    continue  # It was repeated.
                if number > self._next_number:
                    self._reports.restart()
                self._next_number = number + 1
            if (why := await self._take(frames)) is not None:
                return why

    async def _take(self, frames: Sequence[bytes]) -> str | None:
        """Applies a batch. Returns why the events cannot be followed; None: they can."""
        try:
            events = events_of(frames[2]) if _number_of(frames) is not None else None
        except DECODE_FAULTS:
            events = None
        except UntrackedCacheError:
            return "the model has several kinds of cache"
        if events is None:
            self._malformed_count += 1
            self._reports.restart()
            return "their format is unknown" if self._malformed_count >= MAX_MALFORMED else None
        for turn in _turns(events):
            self._reports.apply(turn)
            # A prompt of many blocks does not delay the tokens of other requests.
            await asyncio.sleep(0)
        return None

    async def _repeat(self, context: "zmq.asyncio.Context", folder: Path) -> None:
        """Applies missed batches in order, as far as the engine has kept them."""
        import zmq  # noqa: PLC0415

        socket = context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
            socket.connect(_repeat_address(folder))
            with suppress(TimeoutError):
                async with asyncio.timeout(REPEAT_SECONDS):
                    await socket.send_multipart([b"", self._next_number.to_bytes(NUMBER_BYTES, "big")])
                    while (frames := (await socket.recv_multipart())[1:])[1:2] != [_END_NUMBER]:
                        if _number_of(frames) != self._next_number:
                            return
                        self._next_number += 1
                        if await self._take(frames) is not None:
                            return
        finally:
            socket.close(linger=0)


async def _closed(monitor: "zmq.asyncio.Socket") -> str:
    """Returns once the engine has closed the socket of its events."""
    await monitor.recv_multipart()
    return "the engine has closed their socket"


def _number_of(frames: Sequence[Any]) -> int | None:
    """Returns the number of a message; None: it has another form."""
    if len(frames) != 3 or len(frames[1]) != NUMBER_BYTES:
        return None
    return int.from_bytes(frames[1], "big")
