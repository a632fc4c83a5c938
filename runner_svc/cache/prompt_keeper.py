"""Saves prompts before they lose their slot, and restores them when they are requested again."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence

from runner_svc.backend.port import Backend
from runner_svc.policy.cache_directory import CacheDirectory, CacheTurn, LostPrompt, Partition, common_marks
from runner_svc.policy.kept_prompts import KeptPrompt, KeptPrompts
from weft.kernel.errors import WeftError
from weft.kernel.log import get_logger
from weft.kernel.service import start_task

TokenSize = Callable[[], Awaitable[int | None]]
"""Returns the size in bytes of one cached token; None: unknown."""
Moment = tuple[int, int, int]
"""Number of loose turns, number of flushes, and the version of a slot."""

log = get_logger("weft.runner")


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
    ) -> None:
        self.kept = KeptPrompts(budget_bytes, is_expected)
        self._token_size = token_size
        self._model = model
        self._backend = backend
        self._numbers = itertools.count(1)
        self._works = True
        self._saving: dict[asyncio.Task[None], LostPrompt] = {}

    @property
    def works(self) -> bool:
        """Whether every save that the engine was asked for succeeded."""
        return self._works

    async def best(self, partition: Partition | None, marks: Sequence[bytes]) -> tuple[KeptPrompt | None, int]:
        """Returns the saved prompt with the most common leading marks, and their number; waits for a better one.

        An agent's next turn arrives while the prompt of its last one is being saved, which deletes the earlier version.
        """
        while True:
            found, most = self.kept.best(partition, marks)
            better = [
                saving
                for saving, lost in self._saving.items()
                if lost.partition == partition and common_marks(lost.marks, marks) > most
            ]
            if not better:
                return found, most
            await asyncio.wait(better)

    def moment(self, directory: CacheDirectory, turn: CacheTurn) -> Moment:
        """Returns a value that changes if the slot of a turn may have received other text, or if text is flushed."""
        version = 0 if turn.slot is None else directory.version_of(turn.slot)
        return directory.loose_count, self.kept.flush_count, version

    async def swap(self, directory: CacheDirectory, turn: CacheTurn, begin: Moment, found: KeptPrompt | None) -> bool:
        """Saves the prompt that a turn's slot loses, then restores the one that was found for the turn.

        `begin`: the moment at which the turn started. Returns whether the turn must not use its slot's current content.
        """
        if turn.slot is None:
            return turn.fresh
        if turn.loses is not None and not self.kept.has(turn.loses.partition, turn.loses.marks):
            # Not cancelled with its caller: the engine would write a file that is never deleted.
            saving = start_task(self._save(directory, turn, begin), name=f"keep-prompt-{self._model}")
            self._saving[saving] = turn.loses
            saving.add_done_callback(self._saving.pop)
            await asyncio.shield(saving)
        is_restored = turn.restores and self.moment(directory, turn) == begin and await self._restored(turn.slot, found)
        if directory.loose_count != begin[0]:
            # The engine may have chosen this slot for another turn meanwhile.
            directory.distrust(turn)
            return True
        return turn.fresh and not is_restored

    async def _restored(self, slot: int, found: KeptPrompt | None) -> bool:
        if found is None:
            return False
        self.kept.use(found)
        try:
            await self._backend.restore_slot(slot, found.name)
        except WeftError as error:
            log.warning("stored prompt was not restored", model=self._model, message=error.message)
            self.kept.drop(found)
            self._delete([found])
            return False
        return True

    def forget(self, tenant: str | None, tag: str | None) -> None:
        """Deletes the prompts of a tenant and a tag; None: any."""
        self._delete(self.kept.forget(tenant, tag))

    async def _save(self, directory: CacheDirectory, turn: CacheTurn, begin: Moment) -> None:
        if turn.slot is None or turn.loses is None:
            return
        room = self.kept.make_room(await self._expected_bytes(turn.slot))
        if room is None:
            return
        self._delete(room)
        name = f"prompt-{next(self._numbers)}"
        try:
            byte_count = await self._backend.save_slot(turn.slot, name)
        except WeftError as error:
            # For example a model with a projector, which llama.cpp cannot save.
            log.warning("prompts are kept in slots only", model=self._model, message=error.message)
            self._works = False
            byte_count = 0
        kept = KeptPrompt(name=name, partition=turn.loses.partition, marks=turn.loses.marks, byte_count=byte_count)
        usable = byte_count > 0 and self.moment(directory, turn) == begin
        self._delete(self.kept.add(kept) if usable else [kept])

    async def _expected_bytes(self, slot: int) -> int:
        """Returns the size of a slot's prompt; 0: unknown, the budget is checked after saving."""
        if (per_token := await self._token_size()) is None:
            return 0
        snapshots = await self._backend.slot_snapshots()
        return per_token * next((one.token_count for one in snapshots if one.number == slot), 0)

    def _delete(self, prompts: list[KeptPrompt]) -> None:
        self._backend.delete_saved([kept.name for kept in prompts])
