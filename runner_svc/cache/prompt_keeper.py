"""Prompts that no slot of an engine holds any more: saved before the slot is used, restored when they come again."""

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
"""Returns the bytes that one cached token takes; None: unknown."""
Moment = tuple[int, int, int]
"""Loose turns, flushes, and the version of a slot."""

log = get_logger("weft.runner")


class PromptKeeper:
    """The kept prompts of one incarnation of an engine. Used on the event loop only.

    A prompt belongs to the partition of its slot and is restored for that partition only. What is saved after a flush,
    or after the begin of a turn whose slot the engine chooses, is deleted: the slot may have other text by then.
    """

    def __init__(self, model: str, backend: Backend, budget_bytes: int, token_size: TokenSize) -> None:
        self.kept = KeptPrompts(budget_bytes)
        self._token_size = token_size
        self._model = model
        self._backend = backend
        self._numbers = itertools.count(1)
        self._works = True
        self._saving: dict[asyncio.Task[None], LostPrompt] = {}

    @property
    def works(self) -> bool:
        """Whether the engine has saved all prompts that it was asked to save."""
        return self._works

    async def best(self, partition: Partition | None, marks: Sequence[bytes]) -> tuple[KeptPrompt | None, int]:
        """Returns the kept prompt with the most marks in common, and their number, once no better one is being saved.

        An agent's next turn comes while the prompt of its last one is saved, and an earlier version is deleted.
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
        """Returns what changes when the slot of a turn may get other text, or text is to be forgotten."""
        version = 0 if turn.slot is None else directory.version_of(turn.slot)
        return directory.loose_count, self.kept.flush_count, version

    async def swap(self, directory: CacheDirectory, turn: CacheTurn, begin: Moment, found: KeptPrompt | None) -> bool:
        """Save the prompt that the slot of a turn loses, then restore the one that was found for the turn.

        `begin`: the moment at which the turn began. Returns whether the turn may not use what its slot has now.
        """
        if turn.slot is None:
            return turn.fresh
        if turn.loses is not None and not self.kept.has(turn.loses.partition, turn.loses.marks):
            # A caller that leaves must not end it: the engine would write a file that nobody knows.
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
            log.warning("a kept prompt was not restored", model=self._model, message=error.message)
            self.kept.drop(found)
            self._delete([found])
            return False
        return True

    def forget(self, tenant: str | None, tag: str | None) -> None:
        """Delete the prompts of a tenant and a tag, None: of any."""
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
            # Such as a model with a projector, which llama.cpp cannot save.
            log.warning("prompts are kept in slots only", model=self._model, message=error.message)
            self._works = False
            byte_count = 0
        kept = KeptPrompt(name=name, partition=turn.loses.partition, marks=turn.loses.marks, byte_count=byte_count)
        usable = byte_count > 0 and self.moment(directory, turn) == begin
        self._delete(self.kept.add(kept) if usable else [kept])

    async def _expected_bytes(self, slot: int) -> int:
        """Returns the bytes that the prompt of a slot takes; 0: unknown, its budget is checked once it is saved."""
        if (per_token := await self._token_size()) is None:
            return 0
        snapshots = await self._backend.slot_snapshots()
        return per_token * next((one.token_count for one in snapshots if one.number == slot), 0)

    def _delete(self, prompts: list[KeptPrompt]) -> None:
        self._backend.delete_saved([kept.name for kept in prompts])
