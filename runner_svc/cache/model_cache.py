"""The prefix cache of one model: its use by turns, figures, flushes, and the salts that isolate tenants."""

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Self

import msgspec

from runner_svc.backend.port import Backend, CacheIsolation, CacheUse, ErasedCache, SlotSnapshot
from runner_svc.cache.cached_model import CachedModel, kv_bytes_per_token
from runner_svc.cache.prompt_keeper import PromptKeeper, Restored
from runner_svc.cache.prompt_store import DamagedPromptError, PromptStore
from runner_svc.cache.prompt_transfer import PromptFetcher, description_of, messages_of
from runner_svc.cache.restore_checks import RestoreCheck
from runner_svc.openai_upstream.openai_request import choices_per_prompt
from runner_svc.policy.cache_directory import CacheDirectory, CacheTurn, Partition, SlotState
from runner_svc.policy.engine_blocks import PromptPrefixes
from runner_svc.policy.kept_prompts import KeptPrompt, KeptPrompts
from weft.api.common.v1 import chat_pb2, event_pb2, receipt_pb2, usage_pb2, warning_pb2
from weft.api.runner.v1 import runner_service_pb2
from weft.api.runner.v1.ticket_pb2 import PromptSource
from weft.dispatch.frames import Frame, GenerationPayload
from weft.dispatch.history import SYSTEM_ROLES
from weft.dispatch.payload_description import cache_scope, prompt_prefixes, steady_text
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.machine.file_replacement import replace_file
from weft.kernel.requests.request_values import CacheMode, Handling
from weft.kernel.services.service_lifecycle import start_task, stop_tasks
from weft.kernel.telemetry.log import get_logger
from weft.kernel.text.decoding import DECODE_FAULTS
from weft.kernel.time.timestamps import duration_of, optional_duration

MAX_ERASING_TASKS = 64
"""Maximum number of background erasures; further slots are erased when they are next used."""
ERASURE_WAIT_SECONDS = 1.0
"""Maximum wait of a turn for the erasure of its slot. A later erasure would also remove the turn's own text."""
MAX_REPORTED_PROMPTS = 256
"""Maximum number of stored prompts of which routers learn: the most recently used ones."""
MIN_PACE_TOKENS = 64
"""Minimum number of processed prompt tokens from which the engine's pace is learned: fewer are mostly overhead."""

log = get_logger("weft.runner")


@dataclass(slots=True)
class RunningTurn:
    """A running engine turn, which ends with its block."""

    use: CacheUse = field(default_factory=CacheUse)
    warnings: Frame = field(default_factory=list)
    """Warnings for the caller."""
    worked: bool = False
    """Whether the engine is known to have processed the prompt."""
    restored: Restored | None = None
    """The saved prompt that was restored for it."""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the engine is known to have begun it, or it has ended."""

    on_end: Callable[[bool], Awaitable[None]] | None = None
    """Called at the end, with whether the block has ended without an error."""

    def note_work(self) -> None:
        """Records that the engine has processed the prompt."""
        self.worked = True
        self.begun.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.on_end is not None:
            await self.on_end(error is None)


class ModelCache:
    """One model's cache. Used on the event loop only."""

    def __init__(
        self,
        served: CachedModel,
        salts: "SaltStore | None" = None,
        store: PromptStore | None = None,
        fetcher: PromptFetcher | None = None,
    ) -> None:
        """`salts` is required if the backend's isolation is SALT. `store`: for the prompts of an engine that ends.

        `fetcher`: for those of other runners.
        """
        self._fetcher = fetcher
        self.served = served
        self.model = served.model
        self._store = store
        self._figures = runner_service_pb2.CacheFigures()
        self._salts = salts or SaltStore(None)
        self._incarnation: tuple[int | None, int] = (None, 0)
        self._directory: CacheDirectory | None = None
        self._turn_numbers = count(1)
        self._turns: dict[int, RunningTurn] = {}
        """The running turns of all incarnations, by number."""
        self._token_seconds = 0.0
        self._keeper: PromptKeeper | None = None
        """Saves prompts that lose their slot; None: the engine cannot save them."""
        self._erasing: set[asyncio.Task[None]] = set()
        self._unfinished: dict[asyncio.Future[None], frozenset[int]] = {}
        """Erasures that the engine has not confirmed yet, with their slots."""
        self._is_closed = False

    @property
    def backend(self) -> Backend:
        """The engine, another one after the model's files are pulled."""
        return self.served.backend

    async def token_size(self) -> int | None:
        """Returns the size in bytes of one cached token; None: unknown."""
        return await kv_bytes_per_token(self.served.model_path, self.served.plan.parameters)

    @property
    def figures(self) -> runner_service_pb2.CacheFigures:
        """Hits, misses and tokens of answered requests, from the engine's figures, and saved prompts."""
        found = self._figures
        if self._store is not None:
            stored = self._store.prompts.of_model(self.model)
            found.stored_prompt_count, found.stored_bytes = len(stored), sum(each.byte_count for each in stored)
            found.stored_limit_bytes = self._store.prompts.budget_bytes
        found.ClearField("continues_restored")
        found.ClearField("not_restored_reason")
        if (check := self._restore_check) is not None:
            found.not_restored_reason = check.reason
            if check.resumes is not None:
                found.continues_restored = check.resumes
        keeper = self._running_keeper()
        kept = KeptPrompts(0) if keeper is None else keeper.kept
        found.kept_prompt_count, found.kept_bytes = len(kept), kept.byte_count
        found.kept_limit_bytes = kept.budget_bytes if keeper is not None and keeper.works else 0
        return found

    @property
    def _restore_check(self) -> RestoreCheck | None:
        """Whether the running or last engine continues restored prompts; None: it was not tested."""
        return None if self._store is None else self._store.checks.of(self.backend)

    @property
    def kind(self) -> str:
        """What its engine can restore: a digest over model file, engine build and settings; empty: unknown."""
        digest, kind = self.served.digest, self.backend.state_kind
        return hashlib.sha256(f"{digest} {kind}".encode()).hexdigest() if digest and kind else ""

    async def lent(self, tenant: str, digest: int, kind: str) -> AsyncGenerator[runner_service_pb2.FetchPromptResponse]:
        """Yields a tenant's stored prompt that has this prefix, for an engine of this kind. Raises NOT_FOUND."""
        missing = WeftError(Reason.NOT_FOUND, "there is no such stored prompt")
        store = self._store
        known = [] if store is None or not kind else store.prompts.of_model(self.model)
        own = (each for each in reversed(known) if each.partition.tenant == tenant and not each.partition.adapter)
        prompt = next((each for each in own if each.kind == kind and digest in each.digests), None)
        if store is None or prompt is None:
            raise missing
        flush_count = store.prompts.flush_count
        yield runner_service_pb2.FetchPromptResponse(prompt=description_of(prompt))
        messages = messages_of(store.pieces(prompt))
        while True:
            try:
                message = await asyncio.to_thread(next, messages, None)
            except (DamagedPromptError, OSError) as error:
                log.warning("a stored prompt cannot be moved", model=self.model, error=type(error).__name__)
                raise missing from error
            if store.prompts.flush_count != flush_count:
                # Without its last message it is not used.
                raise missing
            if message is None:
                return
            yield message

    def stored(self) -> runner_service_pb2.StoredPrompts:
        """Returns the prompts on disk that the running engine can restore, or the next one may."""
        found = runner_service_pb2.StoredPrompts()
        if (store := self._store) is None:
            return found
        identity = self.backend.state_identity and f"{self.model}:{self.backend.state_identity}"
        for prompt in reversed(store.prompts.of_model(self.model)):
            if prompt.digests and identity in ("", prompt.identity) and len(found.prompts) < MAX_REPORTED_PROMPTS:
                found.prompts.add(
                    prefix_digests=prompt.digests,
                    byte_count=prompt.byte_count,
                    restore=duration_of(prompt.byte_count / store.bytes_per_second),
                    state_kind=prompt.kind,
                    token_prefill=optional_duration(prompt.seconds / (prompt.token_count or 1) or None),
                )
        return found

    def note(self, usage: usage_pb2.Usage) -> None:
        """Counts one answered request."""
        if usage.cached_prompt_tokens:
            self._figures.hit_count += 1
        else:
            self._figures.miss_count += 1
        self._figures.prompt_token_count += usage.prompt_tokens
        self._figures.cached_token_count += usage.cached_prompt_tokens

    def note_turn(self, turn: RunningTurn, receipt: receipt_pb2.Receipt) -> None:
        """Learns the engine's pace from the receipt of a turn, and writes to it what restoring a prompt saved."""
        usage, prefill = receipt.usage, receipt.engine_timings.prefill_time
        processed = usage.prompt_tokens - usage.cached_prompt_tokens
        if processed >= MIN_PACE_TOKENS and (seconds := prefill.ToNanoseconds() / 1e9):
            self._token_seconds = seconds / processed
            if self._keeper is not None:
                self._keeper.token_seconds = self._token_seconds
        if turn.restored is None:
            return
        if self._keeper is not None:
            self._keeper.note_use(is_used=usage.cached_prompt_tokens > 0)
        if not usage.cached_prompt_tokens:
            return
        told, prompt = receipt.restored_prompt, turn.restored.prompt
        told.source = told.SOURCE_DISK if prompt.identity else told.SOURCE_MEMORY
        if turn.restored.is_moved:
            told.source = told.SOURCE_RUNNER
        told.token_count = usage.cached_prompt_tokens
        if prompt.token_count:
            saved = prompt.seconds * told.token_count / prompt.token_count - turn.restored.seconds
            if saved > 0:
                told.saved_time.FromNanoseconds(int(saved * 1e9))

    async def generating(
        self,
        partition: Partition | None,
        payload: GenerationPayload,
        digests: tuple[int, ...] = (),
        source: PromptSource | None = None,
    ) -> RunningTurn:
        """Begins a generating turn, to enter now. A turn without a partition (None) shares nothing.

        `digests`: the prefixes of its prompt by which routers know it. `source`: a runner that has more of it.
        """
        directory = self._present_directory()
        if directory is None:
            return self._unplaced(partition)
        if not directory.keeps and directory.is_alone(partition):
            return await self._turn(directory, directory.begin_loose(partition))
        spreads, marks, keeper = choices_per_prompt(payload) > 1, prompt_marks(payload), self._keeper
        moving_seconds = 0.0
        if keeper is not None:
            keeper.name(partition, marks, digests)
            if source is not None and partition is not None and self._fetcher is not None and not spreads:
                moving_seconds = await keeper.fetch(self._fetcher, source, partition, marks)
        found, kept_marks = (None, 0) if keeper is None else await keeper.best(partition, marks)
        before = await self._note_empty_slots(directory) if spreads or directory.wants_snapshot else ()
        busy = [snapshot.number for snapshot in before if snapshot.is_busy]
        begun = directory.begin(partition, marks, spreads=spreads, busy=busy, kept_marks=kept_marks)
        turn = await self._turn(directory, begun, before if spreads else (), keeper, found)
        if moving_seconds and turn.restored is not None:
            seconds = turn.restored.seconds + moving_seconds
            turn.restored = replace(turn.restored, seconds=seconds, is_moved=True)
        return turn

    async def ahead(self, partition: Partition, payload: GenerationPayload) -> RunningTurn | None:
        """Begins a turn without a waiting request, to enter now; None: it would remove text that a request may use."""
        directory = self._present_directory()
        if directory is None:
            return self._unplaced(partition)
        if directory.wants_snapshot:
            await self._note_empty_slots(directory)
        keeper, marks = self._keeper, prompt_marks(payload)
        found, kept_marks = (None, 0) if keeper is None else await keeper.best(partition, marks)
        begun = directory.begin_ahead(partition, marks, kept_marks)
        return None if begun is None else await self._turn(directory, begun, keeper=keeper, found=found)

    async def embedding(self, partition: Partition | None) -> RunningTurn:
        """Begins an embedding turn, to enter now: the engine chooses the slot, and keeps the text as a prefix."""
        directory = self._present_directory()
        if directory is None:
            return self._unplaced(partition)
        before = () if directory.is_alone(partition) else await self._note_empty_slots(directory)
        return await self._turn(directory, directory.begin_loose(partition), before)

    async def forget(self, tenant: str | None = None, tag: str | None = None) -> ErasedCache:
        """Forgets the prefixes of a tenant and a tag, which are not used from then on; None: any.

        Raises UNSUPPORTED_OPERATION if the engine shares its cache among all callers.
        """
        self.served.forget(tenant, tag)
        if self._store is not None:
            # In one step with the prompts in memory, which are stored when the engine ends.
            self._store.forget(tenant, tag, self.model)
        isolation = self.backend.cache_isolation
        if (reports := self.backend.prefix_reports) is not None:
            reports.forget(tenant, tag)
        if isolation is CacheIsolation.SALT:
            self._salts.forget(tenant, tag)
            # Prefixes under an old salt are never used again; erasing them only frees memory, if the engine can.
            with suppress(WeftError):
                if (tenant, tag) == (None, None):
                    return await self.backend.erase_cache()
            return ErasedCache(entry_count=0)
        directory = self._present_directory()
        if directory is None:
            if isolation is CacheIsolation.NONE:
                raise WeftError(
                    Reason.UNSUPPORTED_OPERATION, f"the server of {self.model} cannot flush parts of its cache"
                )
            return ErasedCache(entry_count=0, token_count=0)
        if self._keeper is not None:
            self._keeper.forget(tenant, tag)
        erasures = directory.forget(tenant, tag)
        return await self._erase(directory, erasures, self._begin_erasure(erasures))

    async def put_away(self) -> None:
        """Stores the prompts of the idle engine, which ends now, for its next start."""
        directory, keeper = self._directory, self._running_keeper()
        if directory is not None and keeper is not None:
            await keeper.put_away(directory)

    async def close(self) -> None:
        """Ends the background tasks; no new ones start."""
        self._is_closed = True
        await stop_tasks(list(self._erasing))

    def _present_directory(self) -> CacheDirectory | None:
        """Returns the directory of the engine's current incarnation; None: the engine has no slots to isolate."""
        slots = self._slot_count()
        life = (self.backend.process_id, slots)
        if not slots:
            return None
        if self._directory is None or life != self._incarnation:
            budget_bytes = self.backend.kept_prompt_bytes
            check = self._restore_check
            keeps = budget_bytes > 0 and (check is None or check.resumes is not False)
            self._keeper = self._keeper_of(budget_bytes) if keeps else None
            self._incarnation, self._directory = life, CacheDirectory(slots, keeps=keeps, numbers=self._turn_numbers)
            if self._store is not None:
                # Only now is it known which prompts the engine can restore.
                self._store.followers.note_change()
        return self._directory

    def _running_keeper(self) -> PromptKeeper | None:
        """Returns the keeper of the running engine; None: no engine runs, or it cannot save prompts."""
        return self._keeper if self._incarnation[0] == self.backend.process_id is not None else None

    def _keeper_of(self, budget_bytes: int) -> PromptKeeper:
        keeper = PromptKeeper(
            self.model,
            self.backend,
            budget_bytes,
            self.token_size,
            self.served.expects,
            self._store,
            lambda: self.kind,
        )
        keeper.token_seconds = self._token_seconds
        return keeper

    def _slot_count(self) -> int:
        backend = self.backend
        match backend.cache_isolation:
            case CacheIsolation.WHOLE:
                return 1 if backend.process_id is not None else 0
            case CacheIsolation.SLOTS:
                return backend.slot_count
            case _:
                return 0

    def _unplaced(self, partition: Partition | None) -> RunningTurn:
        if self.backend.cache_isolation is CacheIsolation.SALT:
            return RunningTurn(CacheUse(salt=self._salts.salt_of(partition)))
        return RunningTurn(CacheUse(fresh=partition is None), [_cannot_isolate()] if partition is None else [])

    async def _turn(
        self,
        directory: CacheDirectory,
        begun: CacheTurn,
        before: Sequence[SlotSnapshot] = (),
        keeper: PromptKeeper | None = None,
        found: KeptPrompt | None = None,
    ) -> RunningTurn:
        """Begins a turn, after saving its slot's prompt and restoring the one that was found for the turn."""
        begin = None if keeper is None else keeper.moment(directory, begun)
        turn = RunningTurn(CacheUse(slot=begun.slot, fresh=begun.fresh))
        earlier = [self._turns[number].begun for number in begun.after]
        self._turns[begun.number] = turn
        touched: Sequence[int] | None = ()
        try:
            if self._unfinished:
                await self._until_erased(begun.slot)
            for each in earlier:
                await each.wait()
            touched = None
            if keeper is not None and begin is not None:
                fresh, turn.restored = await keeper.swap(directory, begun, begin, found)
                turn.use = CacheUse(slot=begun.slot, fresh=fresh)
                self._figures.restored_prompt_count += turn.restored is not None
                directory.keeps = keeper.works
        except BaseException:
            self._leave(directory, begun, touched)
            raise
        turn.on_end = partial(self._end, directory, begun, before)
        return turn

    async def _end(
        self,
        directory: CacheDirectory,
        begun: CacheTurn,
        before: Sequence[SlotSnapshot],
        is_complete: bool,
    ) -> None:
        touched: Sequence[int] | None = None
        try:
            # The slots of a cancelled turn are unknown, because the engine may still be working on it.
            if before and is_complete:
                touched = _changed(before, await self.backend.slot_snapshots())
        finally:
            self._leave(directory, begun, touched)

    def _leave(self, directory: CacheDirectory, begun: CacheTurn, touched: Sequence[int] | None) -> None:
        """Ends a turn that may have used these slots, None: any, and starts the erasure of what must be erased."""
        turn = self._turns.pop(begun.number)
        erasures = directory.end(begun, worked=turn.worked, touched=touched)
        turn.begun.set()
        if erasures and not self._is_closed and len(self._erasing) < MAX_ERASING_TASKS:
            erasing = self._erase_quietly(directory, erasures, self._begin_erasure(erasures))
            task = start_task(erasing, name=f"erase-cache-{self.model}")
            self._erasing.add(task)
            task.add_done_callback(self._erasing.discard)

    async def _note_empty_slots(self, directory: CacheDirectory) -> Sequence[SlotSnapshot]:
        """Returns the engine's slots, and records the empty ones in the directory."""
        states = directory.states()
        snapshots = await self.backend.slot_snapshots()
        empty = {snapshot.number for snapshot in snapshots if snapshot.is_empty}
        directory.emptied([state for state in states if state.slot in empty])
        directory.note_snapshot()
        return snapshots

    def _begin_erasure(self, erasures: Sequence[SlotState]) -> asyncio.Future[None]:
        """Returns a future that is done once the engine has confirmed or rejected the erasure."""
        done = asyncio.get_running_loop().create_future()
        self._unfinished[done] = frozenset(erasure.slot for erasure in erasures)
        done.add_done_callback(self._unfinished.pop)
        return done

    async def _until_erased(self, slot: int | None) -> None:
        waited_for = [done for done, slots in self._unfinished.items() if slot in slots]
        if waited_for:
            await asyncio.wait(waited_for, timeout=ERASURE_WAIT_SECONDS)

    async def _erase(
        self, directory: CacheDirectory, erasures: Sequence[SlotState], done: asyncio.Future[None]
    ) -> ErasedCache:
        try:
            if not erasures:
                return ErasedCache(entry_count=0, token_count=0)
            erased = await self.backend.erase_cache([erasure.slot for erasure in erasures])
        finally:
            done.set_result(None)
        directory.emptied(erasures)
        return erased

    async def _erase_quietly(
        self, directory: CacheDirectory, erasures: Sequence[SlotState], done: asyncio.Future[None]
    ) -> None:
        try:
            await self._erase(directory, erasures, done)
        except WeftError as error:
            # The text is not used in any case: a slot that may not be empty is used without its cache.
            log.warning("cached prefix was not erased", model=self.model, reason=error.reason.name.lower())


class RequestCache:
    """Cache use of one request."""

    def __init__(
        self,
        cache: ModelCache,
        tenant: str,
        handling: Handling,
        adapter: str = "",
        source: PromptSource | None = None,
    ) -> None:
        """`adapter`: the adapter that answers; empty: the model itself. `source`: a runner with more of its prompt."""
        self._cache = cache
        self._source = None if adapter else source
        shares = handling.cache_mode is not CacheMode.NONE
        self._partition = Partition(tenant, handling.cache_tag, adapter) if shares else None

    async def generating(self, payload: GenerationPayload, prefixes: PromptPrefixes | None = None) -> RunningTurn:
        """Cache use of a generating turn; see ModelCache.generating."""
        # Later turns continue the first one here.
        source, self._source = self._source, None
        digests = () if prefixes is None else prefixes.digests
        return await self._cache.generating(self._partition, payload, digests, source)

    def note_turn(self, turn: RunningTurn, receipt: receipt_pb2.Receipt) -> None:
        """See ModelCache.note_turn."""
        self._cache.note_turn(turn, receipt)

    async def embedding(self) -> RunningTurn:
        """Cache use of an embedding turn; see ModelCache.embedding."""
        return await self._cache.embedding(self._partition)

    def prefixes_of(self, payload: GenerationPayload) -> PromptPrefixes | None:
        """Returns the prefixes of a prompt as its caller sent it; None: routers do not learn about them."""
        partition, backend = self._partition, self._cache.backend
        if partition is None or partition.adapter or not (backend.prefix_reports or backend.kept_prompt_bytes):
            return None
        digests, char_count = prompt_prefixes(payload, cache_scope(partition.tenant, partition.tag))
        return PromptPrefixes(digests, char_count, partition) if digests else None


def _changed(before: Sequence[SlotSnapshot], after: Sequence[SlotSnapshot]) -> list[int] | None:
    """Returns the slots that were used between two snapshots; None: unknown."""
    if not after or any(snapshot.task is None and snapshot.is_busy for snapshot in (*before, *after)):
        return None
    known = {snapshot.number: snapshot for snapshot in before}
    return [
        snapshot.number
        for snapshot in after
        if snapshot.is_busy or snapshot.number not in known or known[snapshot.number] != snapshot
    ]


def _cannot_isolate() -> event_pb2.InferenceEvent:
    code = warning_pb2.WARNING_CODE_UNSUPPORTED_PARAMETER
    message = "this server shares its prefix cache among all callers, which cannot be changed"
    return event_pb2.InferenceEvent(warning=warning_pb2.Warning(code=code, field="cache_mode", message=message))


MARK_BYTES = 512
"""Distance between marks. A smaller one would not pay off, because short prefixes are cheap to compute."""
MAX_MARKS = 1_024
"""Maximum marks per prompt: text after its first 512 KiB is not compared."""
_DIGEST_BYTES = 8


def prompt_marks(payload: GenerationPayload) -> tuple[bytes, ...]:
    """Returns digests of increasingly long prefixes of a prompt: at every MARK_BYTES and at the end of every message.

    Equal marks mean equal prefixes. The text is not stored.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    marks: list[bytes] = []
    for piece in _pieces(payload):
        for begin in range(0, max(1, len(piece)), MARK_BYTES):
            digest.update(piece[begin : begin + MARK_BYTES])
            marks.append(digest.digest())
            if len(marks) == MAX_MARKS:
                return tuple(marks)
    return tuple(marks)


def _pieces(payload: GenerationPayload) -> Iterator[bytes]:
    """Yields the parts of a prompt in the order of chat templates."""
    if not isinstance(payload, chat_pb2.ChatPayload):
        for prompt in payload.prompts:
            yield prompt.text.encode() if prompt.WhichOneof("kind") == "text" else prompt.SerializeToString()
        return
    if payload.tools:
        yield b"".join(tool.SerializeToString() for tool in payload.tools)
    for message in payload.messages:
        is_system = message.role in SYSTEM_ROLES
        yield bytes([message.role]) + b"".join(_part(part, is_system) for part in message.content)
        if message.tool_calls:
            yield b"".join(call.SerializeToString() for call in message.tool_calls)


def _part(part: chat_pb2.ContentPart, is_system: bool) -> bytes:
    if part.WhichOneof("kind") != "text":
        return part.SerializeToString()
    # Text that changes with every request is not sent to engines (`openai_upstream.request`).
    return (steady_text(part.text)[0] if is_system else part.text).encode()


KEY_BYTES = 32
MAX_FORGOTTEN = 4_096
"""Maximum number of tenants and tags with individually changed salts; beyond it, all salts are changed."""
MAX_FILE_BYTES = 4 * 1024 * 1024


class _Forgotten(msgspec.Struct):
    tenant: str | None
    tag: str | None
    times: int


class _Stored(msgspec.Struct):
    key: bytes
    forgotten: list[_Forgotten]


class SaltStore:
    """Salts that isolate the prefixes of tenants in a server that shares its cache among all callers.

    A salt is HMAC-SHA256 over tenant and tag with a random key of this runner, so that callers can neither choose nor
    guess one. Forgetting changes the salt; prefixes under the old salt are never used again.
    """

    def __init__(self, file: Path | None) -> None:
        """`file` stores the key, so that cached prefixes survive restarts; None: not stored."""
        self._file = file
        self._key = secrets.token_bytes(KEY_BYTES)
        self._times: dict[tuple[str | None, str | None], int] = {}
        self._read()

    def salt_of(self, partition: Partition | None) -> str:
        """Returns the salt of a partition; for None, a random salt that is used once."""
        if partition is None:
            return secrets.token_hex(KEY_BYTES)
        tenant, tag = partition.tenant, partition.tag
        times = [self._times.get(scope, 0) for scope in ((None, None), (tenant, None), (None, tag), (tenant, tag))]
        words = [tenant, tag, *map(str, times)]
        if partition.adapter:
            words.append(partition.adapter)
        return hmac.new(self._key, "\0".join(words).encode(), hashlib.sha256).hexdigest()

    def forget(self, tenant: str | None = None, tag: str | None = None) -> None:
        """Changes the salts of a tenant and a tag; None: any. Raises OSError if that cannot be written."""
        scope = (tenant, tag)
        if scope == (None, None) or (scope not in self._times and len(self._times) >= MAX_FORGOTTEN):
            self._key = secrets.token_bytes(KEY_BYTES)
            self._times.clear()
        else:
            self._times[scope] = self._times.get(scope, 0) + 1
        self._write()

    def _read(self) -> None:
        if self._file is None:
            return
        try:
            with self._file.open("rb") as opened:
                stored = msgspec.json.decode(opened.read(MAX_FILE_BYTES), type=_Stored)
        except FileNotFoundError:
            self._store_new()
            return
        except (OSError, *DECODE_FAULTS) as error:
            # A new key makes every prefix cold once, but exposes none.
            log.warning("the prefix cache starts with new salts", error=type(error).__name__)
            self._store_new()
            return
        if len(stored.key) == KEY_BYTES:
            self._key = stored.key
            self._times = {(entry.tenant, entry.tag): entry.times for entry in stored.forgotten[:MAX_FORGOTTEN]}

    def _store_new(self) -> None:
        """Stores a new key; one that cannot be stored lasts until the runner ends."""
        try:
            self._write()
        except OSError as error:
            log.warning("salts of the prefix cache are not stored", file=str(self._file), error=error.strerror)

    def _write(self) -> None:
        if self._file is None:
            return
        forgotten = [_Forgotten(tenant, tag, times) for (tenant, tag), times in self._times.items()]
        replace_file(self._file, msgspec.json.encode(_Stored(self._key, forgotten)))
