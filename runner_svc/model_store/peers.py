"""Stored models that runners of a mesh copy from each other, instead of downloading them again."""

import asyncio
import hashlib
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from runner_svc.model_store.http_file import MAX_FILE_BYTES
from runner_svc.model_store.pull import PullReport, PullSettings, Show
from runner_svc.model_store.store import FORMS, ModelStore, RoomChecks, source_digest
from runner_svc.policy.repository_files import ModelForm, RepositoryFile
from weft.api.registry.v1 import registry_service_pb2, registry_service_pb2_grpc, runner_pb2
from weft.api.runner.v1 import model_store_pb2, runner_service_pb2_grpc
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.kernel.channels.rpc import ChannelPool, calling, open_channel
from weft.kernel.channels.tls_channel import ChannelSecurity
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.models.model_source import ModelSource, is_safe_path, shown_source
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock, SystemClock
from weft.kernel.values.address import metadata_of, relayed_address

if TYPE_CHECKING:
    from weft.api.registry.v1.registry_service_pb2_grpc import RegistryServiceAsyncStub
    from weft.api.runner.v1.runner_service_pb2_grpc import RunnerServiceAsyncStub

PART_BYTES = 1024 * 1024
SEARCH_SECONDS = 3.0
"""Maximum time in which the other runners say what they have."""
SILENCE_SECONDS = 30.0
"""Maximum time between two parts of a file."""
MIN_BYTES_PER_SECOND = 16_384
"""Minimum average rate of a file after SILENCE_SECONDS. With a slower runner, a copy would take hours."""
MAX_PEERS = 1_000
MAX_FILES = 1_000
"""Maximum number of files of a model that is copied."""
_FAILURES = (WeftError, OSError)
"""What ends a copy. TimeoutError is an OSError, too."""
_SHA256 = re.compile(r"[0-9a-f]{64}")

log = get_logger("weft.runner")


class SharedModels:
    """What a runner sends of its model store to other runners. Used on the event loop only."""

    def __init__(
        self,
        store: ModelStore,
        bytes_per_second: int | None,
        clock: Clock | None = None,
        *,
        only: frozenset[str] | None = None,
    ) -> None:
        """`bytes_per_second`: maximum over all files that are sent at a time; None: no limit.

        `only`: digests of the sources that are shared; None: all that are stored.
        """
        self._store = store
        self._only = only
        self._rate = bytes_per_second
        self._clock = clock or SystemClock()
        self._free_at = 0.0
        """When the next part may be sent."""

    async def find(self, digest: str, form: ModelForm | None) -> model_store_pb2.StoredModel:
        """Returns the model of the source with this digest. Raises NOT_FOUND, and INVALID_ARGUMENT naming a field."""
        if not _SHA256.fullmatch(digest):
            raise invalid_field("source_digest", "must be 64 digits in hex")
        is_shared = self._only is None or digest in self._only
        found = await asyncio.to_thread(self._store.find_by_digest, digest, form) if is_shared else None
        if found is None:
            raise WeftError(Reason.NOT_FOUND, "this model is not stored here")
        # Where it is on this machine concerns nobody else.
        found.ClearField("path")
        return found

    async def read(self, sha256: str, offset: int) -> AsyncGenerator[bytes]:
        """Yields a file from `offset` on. Raises NOT_FOUND, and INVALID_ARGUMENT naming a field."""
        if not _SHA256.fullmatch(sha256):
            raise invalid_field("sha256", "must be 64 digits in hex")
        if offset < 0:
            raise invalid_field("offset", "must not be negative")
        try:
            if not await asyncio.to_thread(self._is_shared, sha256):
                raise FileNotFoundError
            content = await asyncio.to_thread(self._store.blob(sha256).open, "rb")
        except OSError as error:
            raise WeftError(Reason.NOT_FOUND, f"no file with the SHA-256 {sha256} is stored here") from error
        with content:
            content.seek(offset)
            while part := await asyncio.to_thread(content.read, PART_BYTES):
                await self._pace(len(part))
                yield part

    def _is_shared(self, sha256: str) -> bool:
        if self._only is None:
            return True
        models = (self._store.find_by_digest(digest, form) for digest in self._only for form in FORMS)
        return any(file.sha256 == sha256 for model in models if model is not None for file in model.files)

    async def _pace(self, byte_count: int) -> None:
        if self._rate is None:
            return
        now = self._clock.monotonic()
        begin = max(now, self._free_at)
        self._free_at = begin + byte_count / self._rate
        if begin > now:
            await self._clock.sleep(begin - now)


@dataclass(frozen=True, slots=True)
class _Offer:
    """A model that another runner has."""

    runner: str
    address: str
    model: model_store_pb2.StoredModel


class ModelPeers:
    """The other runners of a mesh, as sources of model files."""

    def __init__(self, runner: str, registry_address: str, security: ChannelSecurity, *, relay: str = "") -> None:
        """`runner` is the one that copies. `relay`: the target of calls to all others; empty: their own addresses."""
        self._relay = relay
        self._runner = runner
        self._registry_address = registry_address
        self._security = security
        self._clock = SystemClock()

    async def copy(
        self,
        source: ModelSource,
        form: ModelForm | None,
        store: ModelStore,
        limits: PullSettings,
        show: Show,
        listed: Sequence[RepositoryFile] | None,
    ) -> model_store_pb2.StoredModel | None:
        """Copies files of a source that other runners have into a store.

        `listed`: what the source lists, with SHA-256; nothing else is copied. None: it cannot be asked, so the first
        runner of the mesh itself that has the model is trusted, and its manifest returned with `copied_from`. Otherwise
        returns None. What has arrived of a failed copy is kept; the download or the next copy continues there.
        """
        channels = ChannelPool(security=self._security)
        try:
            offers = await self._offers(source, form, channels, with_joined=listed is not None)
            for offer in offers:
                try:
                    files = offer.model.files if listed is None else _listed_files(offer, source, listed)
                    store.create()
                    async with _entered(store.pulling()):
                        await self._copied(offer, files, source, store, limits, show, channels)
                except _FAILURES as error:
                    why = str(error)[:256] or type(error).__name__
                    log.warning("model was not copied", source=shown_source(source), runner=offer.runner, error=why)
                else:
                    if listed is None:
                        offer.model.copied_from = offer.runner
                        return offer.model
            return None
        finally:
            await channels.close()

    async def _offers(
        self, source: ModelSource, form: ModelForm | None, channels: ChannelPool, *, with_joined: bool
    ) -> Sequence[_Offer]:
        """Returns who has a source; the newest first."""
        try:
            async with asyncio.timeout(SEARCH_SECONDS):
                others = await self._others()
                runners = [runner for runner in others if with_joined or not runner.dial_out]
        except (WeftError, TimeoutError) as error:
            log.warning("other runners are unknown, so models are not copied from them", error=str(error)[:256])
            return []
        asked = (self._offer(runner, source, form, channels) for runner in runners)
        offers = [offer for offer in await asyncio.gather(*asked) if offer is not None]
        return sorted(offers, key=lambda offer: offer.model.pull_time.ToNanoseconds(), reverse=True)

    async def _others(self) -> Sequence[runner_pb2.Runner]:
        registry = open_channel(self._registry_address, self._security)
        try:
            stub = cast("RegistryServiceAsyncStub", registry_service_pb2_grpc.RegistryServiceStub(registry))
            request = registry_service_pb2.ListResourcesRequest(kind="runner", page_size=MAX_PEERS)
            with calling(Reason.SERVICE_UNAVAILABLE):
                found = await stub.ListResources(request)
        finally:
            await registry.close()
        runners = []
        for resource in found.resources:
            runner = runner_pb2.Runner()
            if resource.content.Unpack(runner) and runner.status == runner_pb2.Runner.STATUS_ACTIVE:
                runners.append(runner)
        if self._relay:
            for runner in runners:
                runner.address = relayed_address(self._relay, runner.name)
        return [runner for runner in runners if runner.name != self._runner]

    async def _offer(
        self, runner: runner_pb2.Runner, source: ModelSource, form: ModelForm | None, channels: ChannelPool
    ) -> _Offer | None:
        wanted = model_store_pb2.STORED_FORM_UNSPECIFIED if form is None else FORMS[form]
        request = pb.FindStoredModelRequest(source_digest=source_digest(source), form=wanted)
        try:
            async with asyncio.timeout(SEARCH_SECONDS):
                stub = await _stub(channels, runner.address)
                with calling(Reason.WORKER_LOST):
                    found = await stub.FindStoredModel(request, metadata=metadata_of(runner.address))
        except (WeftError, TimeoutError):
            # It does not have it, shares nothing, is older than this rpc, or cannot be reached.
            return None
        return _Offer(runner.name, runner.address, found.model) if _is_valid(found.model) else None

    async def _copied(
        self,
        offer: _Offer,
        files: Iterable[model_store_pb2.StoredFile],
        source: ModelSource,
        store: ModelStore,
        limits: PullSettings,
        show: Show,
        channels: ChannelPool,
    ) -> None:
        """Copies the missing ones of an offer's files. Raises one of _FAILURES."""
        by_digest = {file.sha256: file for file in files}
        missing = [file for file in by_digest.values() if not store.has_blob(file.sha256, file.size_bytes)]
        if not missing:
            return
        needed = sum(file.size_bytes - _size(_partial(store, file)) for file in missing)
        require_room = partial(store.require_room, limit_bytes=limits.disk_limit_bytes, what=shown_source(source))
        require_room(needed)
        report = PullReport(source, show, self._clock)
        report.begin_copy(offer.runner, sum(file.size_bytes for file in missing))
        for file in missing:
            report.begin_file(file.path, file.sha256)
            # Waits for another process that pulls the same file.
            async with _loading(store, _partial(store, file).name, report.note_waiting):
                if not store.has_blob(file.sha256, file.size_bytes):
                    await self._receive(offer, file, store, report, channels, RoomChecks(require_room))
            report.end_file(file.size_bytes)
        log.info("model files were copied", source=shown_source(source), runner=offer.runner, files=len(missing))

    async def _receive(
        self,
        offer: _Offer,
        file: model_store_pb2.StoredFile,
        store: ModelStore,
        report: PullReport,
        channels: ChannelPool,
        room: RoomChecks,
    ) -> None:
        loading, digest = _partial(store, file), hashlib.sha256()
        with await asyncio.to_thread(loading.open, "ab+") as written:
            size = await asyncio.to_thread(_read_again, written, digest)
            stub = await _stub(channels, offer.address)
            request = pb.ReadModelFileRequest(sha256=file.sha256, offset=size)
            call = stub.ReadModelFile(request, metadata=metadata_of(offer.address))
            try:
                async with aclosing(_parts(call, self._clock)) as parts:
                    async for part in parts:
                        room.before(size, len(part), file.size_bytes)
                        size += len(part)
                        if size > file.size_bytes:
                            break
                        await asyncio.to_thread(_append, written, digest, part)
                        report.note_bytes(size)
            finally:
                call.cancel()
        if size < file.size_bytes:
            raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, f"{file.path} ended after {size} bytes")
        if size > file.size_bytes or digest.hexdigest() != file.sha256:
            loading.unlink()
            raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, f"{file.path} is damaged; it was removed")
        await asyncio.to_thread(store.add_blob, loading, file.sha256)


@asynccontextmanager
async def _entered(lock: AbstractContextManager[object]) -> AsyncGenerator[None]:
    """Takes a lock of the store without blocking the event loop."""
    await asyncio.to_thread(lock.__enter__)
    try:
        yield
    finally:
        lock.__exit__(None, None, None)


@asynccontextmanager
async def _loading(store: ModelStore, key: str, on_waiting: Callable[[], None]) -> AsyncGenerator[None]:
    """As `ModelStore.loading`, without blocking the event loop. A cancelled call stops waiting for the lock."""
    has_ended = False

    def note_waiting() -> None:
        if has_ended:
            raise WeftError(Reason.CANCELLED, "the copy was cancelled")
        on_waiting()

    try:
        async with _entered(store.loading(key, note_waiting)):
            yield
    finally:
        has_ended = True


async def _stub(channels: ChannelPool, address: str) -> "RunnerServiceAsyncStub":
    channel = await channels.get(address)
    return cast("RunnerServiceAsyncStub", runner_service_pb2_grpc.RunnerServiceStub(channel))


async def _parts(call: Any, clock: Clock) -> AsyncGenerator[bytes]:
    """Yields the parts of a file. Raises the runner's error, and TimeoutError if it is silent or slow."""
    messages, began, received = aiter(call), clock.monotonic(), 0
    while True:
        try:
            async with asyncio.timeout(SILENCE_SECONDS):
                with calling(Reason.WORKER_LOST):
                    message = await anext(messages)
        except StopAsyncIteration:
            return
        received += len(message.content)
        if received < MIN_BYTES_PER_SECOND * (clock.monotonic() - began - SILENCE_SECONDS):
            raise TimeoutError(f"it sends less than {MIN_BYTES_PER_SECOND} bytes/s")
        yield message.content


def _is_valid(model: model_store_pb2.StoredModel) -> bool:
    """Whether a manifest can be published: what another machine says becomes paths on this one."""
    paths = [model.main_path] if model.main_path else []
    paths += [file.path for file in model.files]
    return (
        0 < len(model.files) <= MAX_FILES
        and all(map(is_safe_path, paths))
        and all(_SHA256.fullmatch(file.sha256) and 0 <= file.size_bytes <= MAX_FILE_BYTES for file in model.files)
    )


def _listed_files(
    offer: _Offer, source: ModelSource, listed: Sequence[RepositoryFile]
) -> list[model_store_pb2.StoredFile]:
    """Returns the files of an offer that a source lists. Logs those that it lists with other content."""
    sizes = {file.sha256: file.size_bytes for file in listed}
    files = [file for file in offer.model.files if sizes.get(file.sha256, -1) in (0, file.size_bytes)]
    paths = {file.path for file in listed} - {file.path for file in files}
    if refused := [file.path for file in offer.model.files if file.path in paths]:
        error = f"{refused[0]} is not the file that the source lists"
        log.warning("copy of a model file was refused", source=shown_source(source), runner=offer.runner, error=error)
    return files


def _partial(store: ModelStore, file: model_store_pb2.StoredFile) -> Path:
    """Returns the partial file of a pull, so that pulls continue copies, and copies pulls."""
    return store.partial / f"sha256-{file.sha256}"


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _read_again(file: BinaryIO, digest: "hashlib._Hash") -> int:
    file.seek(0)
    while part := file.read(PART_BYTES):
        digest.update(part)
    return file.tell()


def _append(file: BinaryIO, digest: "hashlib._Hash", part: bytes) -> None:
    digest.update(part)
    file.write(part)
