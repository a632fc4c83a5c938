"""Saves prompts before they lose their slot or their engine ends, and restores them when they are requested again."""

import asyncio
import itertools
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from runner_svc.backend.port import Backend, SavedSlot
from runner_svc.cache.prompt_store import PromptStore
from runner_svc.cache.prompt_transfer import PromptFetcher
from runner_svc.policy.cache_directory import (
    MIN_LOST_MARKS,
    CacheDirectory,
    CacheTurn,
    LostPrompt,
    Partition,
    common_marks,
)
from runner_svc.policy.kept_prompts import KeptPrompt, KeptPrompts
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.api.runner.v1.ticket_pb2 import PromptSource
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.services.service_lifecycle import start_task
from weft.kernel.telemetry.log import get_logger

TokenSize = Callable[[], Awaitable[int | None]]
"""Returns the size in bytes of one cached token; None: unknown."""
Moment = tuple[int, int, int]
"""Number of loose turns, number of flushes, and the version of a slot."""
MAX_UNUSED_RESTORES = 2
"""After this many restores in a row that the engine did not use, no more are made until its next start: some builds of
llama.cpp, and models with sliding windows or a recurrent state, process restored prompts again."""
MAX_NAMED_PROMPTS = 1_024
"""Maximum number of prompts whose digests are remembered; the oldest is dropped first."""

log = get_logger("weft.runner")


@dataclass(frozen=True, slots=True)
class Restored:
    """A saved prompt that was restored for a turn."""

    prompt: KeptPrompt
    seconds: float
    """Time that it took."""
    is_moved: bool = False
    """Whether it was fetched from another runner for the turn."""


class PromptKeeper:
    """The saved prompts of one engine incarnation. Used on the event loop only.

    A prompt belongs to the partition of its slot and is restored only for that partition. If a flush or a loose turn
    starts while it is saved, it is deleted, because the slot may have other text by then.
    """

    def __init__(
        self,
        model: str,
        backend: Backend,
        budget_bytes: int,
        token_size: TokenSize,
        is_expected: Callable[[KeptPrompt], bool] = lambda _: False,
        store: PromptStore | None = None,
        kind: Callable[[], str] = str,
    ) -> None:
        """`store`: where prompts are stored when the engine ends; None: nowhere. `kind`: see `KeptPrompt.kind`."""
        self._kind = kind
        self.kept = KeptPrompts(budget_bytes, is_expected)
        self._token_size = token_size
        self._model = model
        self._backend = backend
        self._numbers = itertools.count(1)
        self._works = True
        self._unused_count = 0
        """Number of restores in a row that the engine did not use."""
        self._saving: dict[asyncio.Task[None], LostPrompt] = {}
        self._store = store if backend.state_identity else None
        self._identity = f"{model}:{backend.state_identity}"
        self._digests: OrderedDict[tuple[Partition, bytes], tuple[int, ...]] = OrderedDict()
        """The digests by which routers know a prompt, by its last mark."""
        self.token_seconds = 0.0
        """Time in which the engine processes one token of a prompt; 0: unknown."""

    @property
    def works(self) -> bool:
        """Whether every save that the engine was asked for succeeded, and it uses what is restored."""
        return self._works and self._resumes

    @property
    def _resumes(self) -> bool:
        return self._unused_count < MAX_UNUSED_RESTORES

    def note_use(self, *, is_used: bool) -> None:
        """Records whether the engine used a restored prompt, according to the cached tokens that it reports."""
        self._unused_count = 0 if is_used else self._unused_count + 1
        if not self._resumes:
            log.warning("engine does not use restored prompts; they are kept in slots only", model=self._model)

    def name(self, partition: Partition | None, marks: Sequence[bytes], digests: tuple[int, ...]) -> None:
        """Records by which digests routers know a prompt."""
        if partition is not None and marks and digests:
            self._digests[partition, marks[-1]] = digests
            if len(self._digests) > MAX_NAMED_PROMPTS:
                self._digests.popitem(last=False)

    async def best(self, partition: Partition | None, marks: Sequence[bytes]) -> tuple[KeptPrompt | None, int]:
        """Returns the saved prompt with the most common leading marks, and their number; waits for a better one.

        One on disk is not returned if processing what only it has is sooner than its restore, as with small models on
        fast GPUs.
        An agent's next turn arrives while the prompt of its last one is being saved, which deletes the earlier version.
        """

        def may_be_best(prompt: KeptPrompt) -> bool:
            known = (prompt.partition, prompt.identity)
            return known == (partition, self._identity) and common_marks(prompt.marks, marks) > 0

        if not self._resumes:
            return None, 0
        if self._store is not None:
            await self._store.settle(may_be_best)
        while True:
            found, most = self.kept.best(partition, marks)
            better = [
                saving
                for saving, lost in self._saving.items()
                if lost.partition == partition and common_marks(lost.marks, marks) > most
            ]
            if not better:
                break
            await asyncio.wait(better)
        if (store := self._store) is not None:
            stored, count = store.prompts.best(partition, marks, self._identity)
            if stored is not None and count > most and store.is_sooner(stored, (count - most) / len(stored.marks)):
                return stored, count
        return found, most

    async def fetch(
        self, fetcher: PromptFetcher, source: PromptSource, partition: Partition, marks: Sequence[bytes]
    ) -> float:
        """Fetches another runner's prompt to main memory if that is sooner than processing the turn's.

        Returns the seconds that it took; 0: it was not fetched.
        """
        name, kind = f"prompt-{next(self._numbers)}", self._kind()
        file = self._backend.saved_file(name)
        if file is None or not kind or not self._resumes:
            return 0.0
        known, flush_count = (await self.best(partition, marks))[1], self.kept.flush_count

        def wants(prompt: pb.MovedPrompt) -> bool:
            gain = common_marks(prompt.marks, marks) - known
            saved = prompt.token_count * self.token_seconds or prompt.prefill.ToNanoseconds() / 1e9
            # With an unknown pace, the router's estimate counts.
            is_sooner = not saved or prompt.byte_count / fetcher.bytes_per_second < saved * gain / len(prompt.marks)
            if gain < MIN_LOST_MARKS or not is_sooner or (room := self.kept.make_room(prompt.byte_count)) is None:
                return False
            self._delete(room)
            return True

        now = asyncio.get_running_loop().time
        begin = now()
        if (found := await fetcher.fetch(source, kind, wants, file)) is None:
            return 0.0
        kept = KeptPrompt(
            name=name,
            partition=partition,
            marks=tuple(found.marks),
            byte_count=found.byte_count,
            token_count=found.token_count,
            seconds=found.prefill.ToNanoseconds() / 1e9,
            digests=tuple(found.prefix_digests),
        )
        is_flushed = self.kept.flush_count != flush_count
        self._delete([kept] if is_flushed else self.kept.add(kept))
        return 0.0 if is_flushed else now() - begin

    def moment(self, directory: CacheDirectory, turn: CacheTurn) -> Moment:
        """Returns a value that changes if the slot of a turn may have received other text, or if text is flushed."""
        version = 0 if turn.slot is None else directory.version_of(turn.slot)
        return directory.loose_count, self.kept.flush_count, version

    async def swap(
        self, directory: CacheDirectory, turn: CacheTurn, begin: Moment, found: KeptPrompt | None
    ) -> tuple[bool, Restored | None]:
        """Saves the prompt that a turn's slot loses, then restores the one that was found for the turn.

        `begin`: the moment at which the turn started. Returns whether the turn must not use its slot's current content,
        and what was restored.
        """
        if turn.slot is None:
            return turn.fresh, None

        def is_same() -> bool:
            return self.moment(directory, turn) == begin

        if turn.loses is not None and not self.kept.has(turn.loses.partition, turn.loses.marks):
            # Not cancelled with its caller: the engine would write a file that is never deleted.
            saving = start_task(self._save(turn.slot, turn.loses, is_same), name=f"keep-prompt-{self._model}")
            self._saving[saving] = turn.loses
            saving.add_done_callback(self._saving.pop)
            await asyncio.shield(saving)
        restored = await self._restored(turn.slot, found, is_same) if turn.restores else None
        if directory.loose_count != begin[0]:
            # The engine may have chosen this slot for another turn meanwhile.
            directory.distrust(turn)
            return True, None
        return turn.fresh and restored is None, restored

    async def _restored(self, slot: int, found: KeptPrompt | None, is_same: Callable[[], bool]) -> Restored | None:
        if found is None or not is_same():
            return None
        now = asyncio.get_running_loop().time
        begin = now()
        if self._store is not None and found.identity:
            is_restored = await self._read_and_restored(self._store, slot, found, is_same)
        else:
            self.kept.use(found)
            is_restored = await self._is_restored(slot, found.name)
            if not is_restored:
                self.kept.drop(found)
                self._delete([found])
        if not is_restored:
            return None
        seconds = now() - begin
        if self._store is not None and found.identity:
            self._store.note_restored(found, seconds)
        return Restored(found, seconds)

    async def _read_and_restored(
        self, store: PromptStore, slot: int, found: KeptPrompt, is_same: Callable[[], bool]
    ) -> bool:
        # Several turns may restore one prompt simultaneously.
        name = f"stored-{next(self._numbers)}"
        file = self._backend.saved_file(name)
        try:
            if file is None or not await store.read(found, file) or not is_same():
                return False
            if await self._is_restored(slot, name):
                return True
            store.drop(found)
            return False
        finally:
            self._backend.delete_saved([name])

    async def _is_restored(self, slot: int, name: str) -> bool:
        try:
            await self._backend.restore_slot(slot, name)
        except WeftError as error:
            log.warning("saved prompt was not restored", model=self._model, message=error.log_message)
            return False
        return True

    async def put_away(self, directory: CacheDirectory) -> None:
        """Stores all prompts, those in slots too, before the idle engine ends. They are encrypted after its end."""
        if self._store is None or not self._resumes:
            return
        if self._saving:
            await asyncio.wait(self._saving)
        self._put(self._store, self.kept)
        begin = directory.loose_count, self.kept.flush_count
        for slot, prompt in directory.idle_prompts():
            if self._works and not self._store.prompts.has(prompt.partition, prompt.marks, self._identity):
                await self._save(slot, prompt, lambda: (directory.loose_count, self.kept.flush_count) == begin)
                self._put(self._store, [self.kept.best(prompt.partition, prompt.marks)[0]])

    def _put(self, store: PromptStore, prompts: Iterable[KeptPrompt | None]) -> None:
        for kept in prompts:
            file = None if kept is None else self._backend.saved_file(kept.name)
            if kept is None or file is None or store.prompts.has(kept.partition, kept.marks, self._identity):
                continue
            with suppress(OSError):
                size = file.stat().st_size
                stored = replace(
                    kept, name=secrets.token_hex(8), identity=self._identity, kind=self._kind(), byte_count=size
                )
                # The open file remains readable when the engine's folder is deleted.
                store.put(stored, file.open("rb"))

    def forget(self, tenant: str | None, tag: str | None) -> None:
        """Deletes the prompts of a tenant and a tag; None: any."""
        self._delete(self.kept.forget(tenant, tag))

    async def _save(self, slot: int, lost: LostPrompt, is_same: Callable[[], bool]) -> None:
        """Saves the prompt in a slot; `is_same` tells whether the slot is known to have nothing else."""
        per_token, token_count = await self._token_size(), await self._token_count(slot)
        # With an unknown size, the budget is checked after saving.
        room = self.kept.make_room((per_token or 0) * token_count)
        if room is None:
            return
        self._delete(room)
        name = f"prompt-{next(self._numbers)}"
        try:
            saved = await self._backend.save_slot(slot, name)
        except WeftError as error:
            # For example a model with a projector, which llama.cpp cannot save.
            log.warning("prompts are kept in slots only", model=self._model, message=error.log_message)
            self._works = False
            saved = SavedSlot()
        token_count = saved.token_count or token_count
        kept = KeptPrompt(
            name=name,
            partition=lost.partition,
            marks=lost.marks,
            byte_count=saved.byte_count,
            token_count=token_count,
            seconds=token_count * self.token_seconds,
            digests=self._digests.get((lost.partition, lost.marks[-1]), ()),
        )
        usable = saved.byte_count > 0 and is_same()
        self._delete(self.kept.add(kept) if usable else [kept])

    async def _token_count(self, slot: int) -> int:
        """Returns the number of tokens in a slot; 0: unknown."""
        snapshots = await self._backend.slot_snapshots()
        return next((one.token_count for one in snapshots if one.number == slot), 0)

    def _delete(self, prompts: list[KeptPrompt]) -> None:
        self._backend.delete_saved([kept.name for kept in prompts])
