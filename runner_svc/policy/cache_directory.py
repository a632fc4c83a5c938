"""The cache directory of an engine: which partition owns the prefix in each slot, and which slot each turn uses.

A *placed* turn uses the slot that the directory selects. A *loose* turn uses a slot that the engine selects: it may
leave its text in any slot that is idle during the turn. Embeddings are loose (llama.cpp's server assigns them no slot,
but their text becomes a cached prefix for completions: measured), and so are turns with several choices, which use
several slots.

As long as only one partition uses an engine, all turns are loose: the engine knows best which slot has the longest
prefix of a prompt. After the first turn of another partition, the directory places turns. If prompts are saved when
they lose their slot (`keeps`), all turns are placed, since only then is it known which prompt a slot loses.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import count
from operator import attrgetter
from typing import NamedTuple

from weft.kernel.values.fast_dataclass import fast_dataclass

MAX_CACHE_SLOTS = 1_024
MIN_LOST_MARKS = 2
"""A slot's prompt is saved if it would lose at least this many marks: about a kilobyte of text."""


def common_marks(mine: Sequence[bytes], theirs: Sequence[bytes]) -> int:
    """Returns the number of equal leading marks of two prompts. Each mark covers all text before it."""
    if not mine or not theirs or mine[0] != theirs[0]:
        return 0
    if mine == theirs:
        return len(mine)
    equal, beyond = 1, min(len(mine), len(theirs)) + 1
    while beyond - equal > 1:
        middle = (equal + beyond) // 2
        if mine[middle - 1] == theirs[middle - 1]:
            equal = middle
        else:
            beyond = middle
    return equal


class Partition(NamedTuple):
    """Requests that may share cached prefixes: those of one tenant, cache tag and adapter."""

    # Every request compares it with each slot's owner: a dataclass would call Python for each.
    tenant: str
    tag: str = ""
    adapter: str = ""
    """Empty: the base model."""

    def is_meant(self, tenant: str | None, tag: str | None) -> bool:
        """Whether it matches a tenant and a tag; None: any."""
        return tenant in (None, self.tenant) and tag in (None, self.tag)


class UnownedContent(Enum):
    """Content of a slot without an owner."""

    EMPTY = "nothing"
    UNUSABLE = "unusable"
    """Text that must not be used: of several partitions, of an unshared request, or forgotten."""


Owner = Partition | UnownedContent


@fast_dataclass(kw_only=True)
class CacheTurn:
    """Cache use of one engine turn; ended by `CacheDirectory.end`."""

    number: int
    slot: int | None
    """Slot of a placed turn; None: the engine chooses."""
    fresh: bool
    """Whether cached text must not be used."""
    loses: "LostPrompt | None" = None
    """The prompt in its slot that must be saved first."""
    restores: bool = False
    """Whether the saved prompt must be restored into its slot first."""
    after: frozenset[int] = frozenset()
    """Numbers of the turns that the engine must begin first: a loose turn could take the slots of placed ones."""


@dataclass(frozen=True, slots=True)
class LostPrompt:
    """A prompt that its slot loses when the next turn starts there."""

    partition: Partition
    marks: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class SlotState:
    """A version of a slot's content."""

    slot: int
    version: int


@dataclass(slots=True)
class _Slot:
    number: int
    owner: Owner = UnownedContent.EMPTY
    marks: tuple[bytes, ...] = ()
    last_use: int = 0
    version: int = 0
    ahead_version: int = 0
    """The version of its content that was processed ahead; it differs once another turn may have used the slot."""
    turn: CacheTurn | None = None
    is_foreign: bool = False
    """Whether it may hold another partition's text until its turn has worked."""
    forget: bool = False
    """Whether its content is forgotten at the end of its turn."""

    def give_to(self, owner: Owner, marks: tuple[bytes, ...] = ()) -> None:
        self.owner, self.marks = owner, marks
        self.version += 1

    def erasure(self) -> SlotState:
        self.give_to(UnownedContent.UNUSABLE)
        return SlotState(self.number, self.version)


@dataclass(slots=True)
class CacheDirectory:
    """The slots of one engine incarnation. A turn is never rejected: without a free slot it is loose.

    A turn without a partition (None) shares nothing.
    """

    slot_count: int
    keeps: bool = False
    """Whether prompts that lose their slot are saved."""
    loose_count: int = 0
    """Number of loose turns so far. Each one can change the text in any slot."""
    numbers: Iterator[int] = field(default_factory=lambda: count(1))
    """The numbers of its turns, in order."""
    _slots: list[_Slot] = field(init=False)
    _loose: dict[int, Partition | None] = field(default_factory=dict)
    """Running loose turns and the partition of their text."""
    _only: Partition | None = None
    """The first partition that used this engine."""
    _several: bool = False
    _unsure: bool = False
    """Whether a finished loose turn may have used any slot."""

    def __post_init__(self) -> None:
        if not 1 <= self.slot_count <= MAX_CACHE_SLOTS:
            raise ValueError(f"an engine has 1 to {MAX_CACHE_SLOTS} slots, not {self.slot_count}")
        self._slots = [_Slot(number) for number in range(self.slot_count)]

    def is_alone(self, partition: Partition | None) -> bool:
        """Whether a turn of this partition may be loose because no other partition has text here."""
        if partition is None or self._several or self._only not in (None, partition):
            return False
        for loose in self._loose.values():
            if loose != partition:
                return False
        for slot in self._slots:
            if slot.owner not in (UnownedContent.EMPTY, partition):
                return False
            if slot.turn is not None and (slot.is_foreign or slot.forget):
                # Until that turn reaches the engine, the slot may hold text that it must not use; text to be forgotten
                # stays until the turn ends.
                return False
        return True

    @property
    def wants_snapshot(self) -> bool:
        """Whether a snapshot of the engine's slots would add information; see `begin` and `emptied`."""
        return self._unsure or bool(self._loose)

    def states(self) -> tuple[SlotState, ...]:
        """The versions of all slots, to pass to `emptied` after a snapshot of the engine."""
        return tuple(SlotState(slot.number, slot.version) for slot in self._slots)

    def version_of(self, slot: int) -> int:
        """Returns the version of a slot's content."""
        return self._slots[slot].version

    def owner_of(self, slot: int) -> Owner:
        """Returns the owner of a slot's content, or of its future content while a turn uses it."""
        return self._slots[slot].owner

    def idle_prompts(self) -> list[tuple[int, LostPrompt]]:
        """Returns the prompts in slots without a turn; none while a loose turn runs, which may change them."""
        return [
            (slot.number, LostPrompt(slot.owner, slot.marks))
            for slot in self._slots
            if not self._loose and slot.turn is None
            if isinstance(slot.owner, Partition) and len(slot.marks) >= MIN_LOST_MARKS
        ]

    def begin(
        self,
        partition: Partition | None,
        marks: Sequence[bytes] = (),
        *,
        spreads: bool = False,
        busy: Collection[int] = (),
        kept_marks: int = 0,
    ) -> CacheTurn:
        """Starts a turn.

        `marks`: digests of increasingly long prefixes of its prompt; empty: unknown. `spreads`: it uses several slots.
        `busy`: slots in which the engine is working, to be avoided if others are free. `kept_marks`: number of leading
        marks that it shares with the best saved prompt.
        """
        if not self.keeps and self.is_alone(partition):
            return self.begin_loose(partition)
        self._note(partition)
        slot = self._choose(partition, marks, busy, kept_marks)
        if slot is None:
            return self._next_loose(partition, fresh=not self.is_alone(partition))
        turn = self._place(slot, partition, marks, kept_marks, spreads=spreads)
        return self._loosen(turn, partition) if spreads else turn

    def begin_loose(self, partition: Partition | None) -> CacheTurn:
        """Starts a turn whose slot the engine always chooses, such as an embedding."""
        self._note(partition)
        return self._next_loose(partition, fresh=partition is None)

    def begin_ahead(self, partition: Partition, marks: Sequence[bytes], kept_marks: int = 0) -> CacheTurn | None:
        """Starts a turn without a waiting request; None: it would remove text that a request may use.

        It gets an empty slot, or the one of its interrupted turn. If prompts are saved, it may also replace text of its
        partition that was processed ahead.
        """
        free = [slot for slot in self._slots if slot.turn is None]
        ahead = [slot for slot in free if slot.owner == partition and slot.version == slot.ahead_version]
        own = [slot for slot in ahead if slot.marks == tuple(marks)]
        spare = [*own, *_owned_by(free, UnownedContent.EMPTY), *(ahead if self.keeps else ())]
        if not spare:
            return None
        self._note(partition)
        turn = self._place(spare[0], partition, marks, kept_marks)
        spare[0].ahead_version = spare[0].version
        return turn

    def distrust(self, turn: CacheTurn) -> None:
        """Records that a turn's slot may receive other text before the turn starts: it is erased afterwards."""
        if turn.slot is not None:
            self._slots[turn.slot].forget = True

    def end(self, turn: CacheTurn, *, worked: bool, touched: Collection[int] | None = None) -> tuple[SlotState, ...]:
        """Ends a turn. Returns the slots to erase now.

        `worked`: whether the engine is known to have processed its prompt; otherwise the slot may still hold its
        earlier content. `touched`: the slots that a loose turn may have used; None: all.
        """
        erasures: list[SlotState] = []
        if turn.slot is not None:
            erasures += self._leave(self._slots[turn.slot], turn, worked=worked)
        if turn.number in self._loose:
            erasures += self._spill(self._loose.pop(turn.number), touched)
        return tuple(erasures)

    def forget(self, tenant: str | None = None, tag: str | None = None) -> tuple[SlotState, ...]:
        """Forgets the text of a tenant and a tag; None: any. Returns the slots to erase now.

        The text is no longer used from now on. Slots in use are erased when their turns end.
        """
        for number, partition in self._loose.items():
            if partition is not None and partition.is_meant(tenant, tag):
                self._loose[number] = None
        erasures: list[SlotState] = []
        for slot in self._slots:
            if slot.owner is UnownedContent.EMPTY:
                continue
            if isinstance(slot.owner, Partition) and not slot.owner.is_meant(tenant, tag):
                continue
            if slot.turn is None:
                erasures.append(slot.erasure())
            else:
                slot.forget = True
        return tuple(erasures)

    def emptied(self, states: Sequence[SlotState]) -> None:
        """Records slots that were observed to be empty, unless their version has changed since.

        A running loose turn may still leave its text there: `_is_foreign` and `_spill` take that into account.
        """
        for state in states:
            slot = self._slots[state.slot]
            if slot.version == state.version and slot.turn is None:
                slot.give_to(UnownedContent.EMPTY)

    def note_snapshot(self) -> None:
        """Records that a snapshot of the engine was evaluated."""
        self._unsure = False

    def _note(self, partition: Partition | None) -> None:
        if partition is not None:
            self._several = self._several or self._only not in (None, partition)
            self._only = self._only or partition

    def _place(
        self,
        slot: _Slot,
        partition: Partition | None,
        marks: Sequence[bytes],
        kept_marks: int,
        *,
        spreads: bool = False,
    ) -> CacheTurn:
        slot.is_foreign = self._is_foreign(slot, partition)
        # A loose turn that begins later may reach an empty slot first. Nothing is lost there by not reading the cache.
        fresh = slot.is_foreign or slot.owner is UnownedContent.EMPTY
        loses, restores = None, False
        if self.keeps and not spreads and not self._loose:
            common = common_marks(slot.marks, marks) if slot.owner == partition else 0
            if isinstance(slot.owner, Partition) and len(slot.marks) - common >= MIN_LOST_MARKS:
                loses = LostPrompt(slot.owner, slot.marks)
            restores = kept_marks - common >= MIN_LOST_MARKS
        turn = CacheTurn(number=next(self.numbers), slot=slot.number, fresh=fresh, loses=loses, restores=restores)
        slot.turn = turn
        slot.give_to(UnownedContent.UNUSABLE if partition is None else partition, tuple(marks))
        return turn

    def _next_loose(self, partition: Partition | None, *, fresh: bool) -> CacheTurn:
        return self._loosen(CacheTurn(number=next(self.numbers), slot=None, fresh=fresh), partition)

    def _loosen(self, turn: CacheTurn, partition: Partition | None) -> CacheTurn:
        self.loose_count += 1
        self._loose[turn.number] = partition
        placed = (slot.turn.number for slot in self._slots if slot.turn is not None and slot.owner != partition)
        after = frozenset(placed) - {turn.number}
        return replace(turn, after=after) if after else turn

    def _is_foreign(self, slot: _Slot, partition: Partition | None) -> bool:
        """Whether a slot may hold another partition's text, now or when the turn starts."""
        if partition is None or (self._loose and any(loose != partition for loose in self._loose.values())):
            return True
        return slot.owner not in (partition, UnownedContent.EMPTY)

    def _choose(
        self, partition: Partition | None, marks: Sequence[bytes], busy: Collection[int], kept_marks: int
    ) -> _Slot | None:
        free = [slot for slot in self._slots if slot.turn is None]
        if busy:
            free = [slot for slot in free if slot.number not in busy] or free
        if not free:
            return None
        own = [] if partition is None else _owned_by(free, partition)
        # Among equally long prefixes, take the least recently used slot: the others' text is more likely to be used
        # again.
        best, common = None, 0
        for slot in own:
            if slot.marks:
                equal = common_marks(slot.marks, marks)
                if best is None or equal > common or (equal == common and slot.last_use < best.last_use):
                    best, common = slot, equal
        # A longer saved prompt is restored into another slot, unless this slot holds only its beginning.
        if best is not None and common and (kept_marks - common < MIN_LOST_MARKS or common == len(best.marks)):
            return best
        unknown = own if not marks else [slot for slot in own if not slot.marks]
        if unknown:
            return max(unknown, key=_last_use)
        # Unowned slots first, then the partition's own, so that one partition cannot evict all others.
        for owned in (_owned_by(free, UnownedContent.EMPTY), _owned_by(free, UnownedContent.UNUSABLE), own, free):
            if owned:
                return min(owned, key=_last_use)
        return None

    def _leave(self, slot: _Slot, turn: CacheTurn, *, worked: bool) -> list[SlotState]:
        slot.turn, slot.last_use = None, turn.number
        must_forget, slot.forget = slot.forget, False
        is_foreign, slot.is_foreign = slot.is_foreign, False
        # A slot that was not used after a prompt was restored in it is reported as empty.
        if must_forget or slot.owner is UnownedContent.UNUSABLE or (turn.restores and not worked):
            return [slot.erasure()]
        if is_foreign and not worked:
            # The other text may still be there.
            slot.give_to(UnownedContent.UNUSABLE)
        return []

    def _spill(self, partition: Partition | None, touched: Collection[int] | None) -> list[SlotState]:
        """Ends a loose turn, which may have left its text in every slot without a placed turn."""
        self._unsure = self._unsure or touched is None
        erasures: list[SlotState] = []
        for slot in self._slots:
            if slot.turn is not None or (touched is not None and slot.number not in touched):
                continue
            if partition is None:
                erasures.append(slot.erasure())
            elif slot.owner in (UnownedContent.EMPTY, partition):
                slot.owner = partition
                slot.version += 1
            else:
                slot.give_to(UnownedContent.UNUSABLE)
        return erasures


_last_use = attrgetter("last_use")


def _owned_by(slots: Sequence[_Slot], owner: Owner) -> list[_Slot]:
    return [slot for slot in slots if slot.owner == owner]
