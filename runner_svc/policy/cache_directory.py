"""The cache directory of an engine: the owner of each slot's prefix, and the slot of each turn, isolated by partition.

There are two kinds of turns. A *placed* turn works in the slot that the directory names. A *loose* turn works in a slot
of the engine's choice: it may leave its text in any slot that is idle meanwhile. Embeddings are loose (llama.cpp's
server takes no slot for them, and their text is a cached prefix for completions afterwards: measured), and so are turns
with several choices, whose further choices take further slots.

While a single partition has used an engine, all its turns are loose: the engine knows best which of its slots has the
longest prefix of a prompt. From the first turn of another partition on the directory places them. Where prompts that no
slot holds are kept (`keeps`), it places all turns: only then is it known which prompt a slot loses.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from weft.kernel.value import value_class

MAX_CACHE_SLOTS = 1_024
MIN_LOST_MARKS = 2
"""A slot's prompt is saved if it would lose at least this many marks: about a kilobyte of text."""


def common_marks(mine: Sequence[bytes], theirs: Sequence[bytes]) -> int:
    """Returns the number of marks at which two prompts are equal. Each mark covers all text before it."""
    equal, beyond = 0, min(len(mine), len(theirs)) + 1
    while beyond - equal > 1:
        middle = (equal + beyond) // 2
        if mine[middle - 1] == theirs[middle - 1]:
            equal = middle
        else:
            beyond = middle
    return equal


@dataclass(frozen=True, slots=True)
class Partition:
    """The requests that may share cached prefixes: those of one tenant with one tag and one adapter of the model."""

    tenant: str
    tag: str = ""
    adapter: str = ""
    """Empty: the model without an adapter."""

    def is_meant(self, tenant: str | None, tag: str | None) -> bool:
        """Whether it matches a tenant and a tag; None: any."""
        return tenant in (None, self.tenant) and tag in (None, self.tag)


class UnownedContent(Enum):
    """The content of a slot that no partition owns."""

    EMPTY = "nothing"
    """The slot is empty."""
    UNUSABLE = "unusable"
    """Text of several partitions, of an unshared request, or to be forgotten: it must not be used."""


Owner = Partition | UnownedContent


@value_class(kw_only=True)
class CacheTurn:
    """Cache use of one turn of an engine; ended by `CacheDirectory.end`."""

    number: int
    """Sequence number of the turn."""
    slot: int | None
    """Slot of a placed turn; None: the engine chooses."""
    fresh: bool
    """Whether no cached text may be used."""
    loses: "LostPrompt | None" = None
    """The prompt that its slot holds and is to be saved first."""
    restores: bool = False
    """Whether the kept prompt is to be restored in its slot first."""


@dataclass(frozen=True, slots=True)
class LostPrompt:
    """A prompt that a slot holds no longer once the next turn works in it."""

    partition: Partition
    marks: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class SlotState:
    """One version of a slot's content."""

    slot: int
    version: int


@dataclass(slots=True)
class _Slot:
    number: int
    owner: Owner = UnownedContent.EMPTY
    marks: tuple[bytes, ...] = ()
    last_use: int = 0
    version: int = 0
    turn: CacheTurn | None = None
    forget: bool = False
    """Whether its content is forgotten when its turn ends."""

    def give_to(self, owner: Owner, marks: tuple[bytes, ...] = ()) -> None:
        self.owner, self.marks = owner, marks
        self.version += 1

    def erasure(self) -> SlotState:
        self.give_to(UnownedContent.UNUSABLE)
        return SlotState(self.number, self.version)

    def common_marks(self, marks: Sequence[bytes]) -> int:
        return common_marks(self.marks, marks)


@dataclass(slots=True)
class CacheDirectory:
    """The slots of one incarnation of an engine. No turn is refused: without a free slot it is loose.

    A turn whose partition is None shares with no other.
    """

    slot_count: int
    keeps: bool = False
    """Whether prompts that no slot holds are kept."""
    loose_count: int = 0
    """Loose turns so far: while one begins, any slot may get other text."""
    _slots: list[_Slot] = field(init=False)
    _loose: dict[int, Partition | None] = field(default_factory=dict)
    """Loose turns under way, and the partition of their text."""
    _only: Partition | None = None
    """First partition that used this engine."""
    _several: bool = False
    _unsure: bool = False
    """Whether an ended loose turn may have worked in any slot."""
    _turns: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.slot_count <= MAX_CACHE_SLOTS:
            raise ValueError(f"an engine has 1 to {MAX_CACHE_SLOTS} slots, not {self.slot_count}")
        self._slots = [_Slot(number) for number in range(self.slot_count)]

    def is_alone(self, partition: Partition | None) -> bool:
        """Whether a turn of this partition may be loose: there is no text of another partition."""
        partition = self._known(partition)
        if partition is None or self._several or self._only not in (None, partition):
            return False
        for loose in self._loose.values():
            if loose is not partition and loose != partition:
                return False
        for slot in self._slots:
            owner = slot.owner
            if owner is not partition and owner is not UnownedContent.EMPTY and owner != partition:
                return False
            if slot.turn is not None and (slot.turn.fresh or slot.forget):
                # Until that turn reaches the engine, the slot may hold text that it must not use; what is to be
                # forgotten is there until it ends.
                return False
        return True

    @property
    def wants_snapshot(self) -> bool:
        """Whether a snapshot of the engine's slots would add information; see `begin` and `emptied`."""
        return self._unsure or bool(self._loose)

    def states(self) -> tuple[SlotState, ...]:
        """The version of every slot, for `emptied` after a snapshot of the engine."""
        return tuple(SlotState(slot.number, slot.version) for slot in self._slots)

    def version_of(self, slot: int) -> int:
        """Returns the version of a slot's content."""
        return self._slots[slot].version

    def owner_of(self, slot: int) -> Owner:
        """The owner of a slot's content, as far as known; of a slot in use, of its future content."""
        return self._slots[slot].owner

    def begin(
        self,
        partition: Partition | None,
        marks: Sequence[bytes] = (),
        *,
        spreads: bool = False,
        busy: Collection[int] = (),
        kept_marks: int = 0,
    ) -> CacheTurn:
        """Begin a turn.

        `marks`: digests of ever longer prefixes of its prompt; empty: unknown. `spreads`: it takes several slots of
        the engine. `busy`: slots that the engine works in, which are avoided while others are free. `kept_marks`: what
        the best kept prompt has in common with it.
        """
        partition = self._known(partition)
        if not self.keeps and self.is_alone(partition):
            return self.begin_loose(partition)
        self._note(partition)
        slot = self._choose(partition, marks, busy, kept_marks)
        if slot is None:
            return self._loosen(self._next_turn(None, fresh=not self.is_alone(partition)), partition)
        turn = self._next_turn(slot.number, fresh=self._is_foreign(slot, partition))
        if self.keeps and not spreads and not self._loose:
            common = slot.common_marks(marks) if slot.owner == partition else 0
            if isinstance(slot.owner, Partition) and len(slot.marks) - common >= MIN_LOST_MARKS:
                turn = replace(turn, loses=LostPrompt(slot.owner, slot.marks))
            turn = replace(turn, restores=kept_marks - common >= MIN_LOST_MARKS)
        slot.turn = turn
        slot.give_to(UnownedContent.UNUSABLE if partition is None else partition, tuple(marks))
        return self._loosen(turn, partition) if spreads else turn

    def begin_loose(self, partition: Partition | None) -> CacheTurn:
        """Begin a turn whose slot the engine chooses in any case, such as an embedding."""
        partition = self._known(partition)
        self._note(partition)
        return self._loosen(self._next_turn(None, fresh=partition is None), partition)

    def distrust(self, turn: CacheTurn) -> None:
        """Record that the slot of a turn may have got other text before the turn works: it is erased afterwards."""
        if turn.slot is not None:
            self._slots[turn.slot].forget = True

    def end(self, turn: CacheTurn, *, worked: bool, touched: Collection[int] | None = None) -> tuple[SlotState, ...]:
        """End a turn. Returns the slots to erase now.

        `worked`: whether the engine is known to have worked on its prompt; otherwise its slot may hold its earlier
        content. `touched`: the slots that a loose turn can have worked in; None: all.
        """
        erasures: list[SlotState] = []
        if turn.slot is not None:
            erasures += self._leave(self._slots[turn.slot], turn, worked=worked)
        if turn.number in self._loose:
            erasures += self._spill(self._loose.pop(turn.number), touched)
        return tuple(erasures)

    def forget(self, tenant: str | None = None, tag: str | None = None) -> tuple[SlotState, ...]:
        """Forget the text of a tenant and a tag, None: of any. Returns the slots to erase now.

        None of it is used from here on. Slots in use are forgotten when their turns end.
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
        """Record slots that were observed to be empty; a slot whose version has changed since is left as it is.

        A loose turn under way may still leave its text there: `_is_foreign` and `_spill` take that into account.
        """
        for state in states:
            slot = self._slots[state.slot]
            if slot.version == state.version and slot.turn is None:
                slot.give_to(UnownedContent.EMPTY)

    def note_snapshot(self) -> None:
        """Record that a snapshot of the engine was evaluated."""
        self._unsure = False

    def _known(self, partition: Partition | None) -> Partition | None:
        """Returns the partition object that the slots hold: identical objects are compared fast."""
        return self._only if partition == self._only else partition

    def _note(self, partition: Partition | None) -> None:
        if partition is not None:
            self._several = self._several or self._only not in (None, partition)
            self._only = self._only or partition

    def _next_turn(self, slot: int | None, *, fresh: bool) -> CacheTurn:
        self._turns += 1
        return CacheTurn(number=self._turns, slot=slot, fresh=fresh)

    def _loosen(self, turn: CacheTurn, partition: Partition | None) -> CacheTurn:
        self.loose_count += 1
        self._loose[turn.number] = partition
        return turn

    def _is_foreign(self, slot: _Slot, partition: Partition | None) -> bool:
        """Whether a slot may hold text of another partition, now or when the turn begins to work."""
        if partition is None or any(loose != partition for loose in self._loose.values()):
            return True
        return slot.owner not in (UnownedContent.EMPTY, partition)

    def _choose(
        self, partition: Partition | None, marks: Sequence[bytes], busy: Collection[int], kept_marks: int
    ) -> _Slot | None:
        free = [slot for slot in self._slots if slot.turn is None]
        free = [slot for slot in free if slot.number not in busy] or free
        if not free:
            return None
        own = [slot for slot in free if partition is not None and slot.owner == partition]
        # Of slots with equally long prefixes the least recently used: the rest of the others may be used sooner.
        best = max(own, key=lambda slot: (slot.common_marks(marks), -slot.last_use), default=None)
        common = 0 if best is None else best.common_marks(marks)
        # A kept prompt that is longer is restored in another slot, unless this one holds only its beginning.
        if best is not None and common and (kept_marks - common < MIN_LOST_MARKS or common == len(best.marks)):
            return best
        unknown = own if not marks else [slot for slot in own if not slot.marks]
        if unknown:
            return max(unknown, key=_last_use)
        # Unowned slots first, then the partition's own: many prompts of one must not evict those of all others.
        for owned in (_owned_by(free, UnownedContent.EMPTY), _owned_by(free, UnownedContent.UNUSABLE), own, free):
            if owned:
                return min(owned, key=_last_use)
        return None

    def _leave(self, slot: _Slot, turn: CacheTurn, *, worked: bool) -> list[SlotState]:
        slot.turn, slot.last_use = None, turn.number
        must_forget, slot.forget = slot.forget, False
        # A slot that has not worked since a prompt was restored in it is reported as empty.
        if must_forget or slot.owner is UnownedContent.UNUSABLE or (turn.restores and not worked):
            return [slot.erasure()]
        if turn.fresh and not worked:
            # Its earlier content may still be there.
            slot.give_to(UnownedContent.UNUSABLE)
        return []

    def _spill(self, partition: Partition | None, touched: Collection[int] | None) -> list[SlotState]:
        """End a loose turn: it may have left its text in every slot without a placed turn."""
        self._unsure = self._unsure or touched is None
        erasures: list[SlotState] = []
        for slot in self._slots:
            if slot.turn is not None or (touched is not None and slot.number not in touched):
                continue
            if partition is None:
                erasures.append(slot.erasure())
            elif slot.owner is partition or slot.owner in (UnownedContent.EMPTY, partition):
                slot.owner = partition
                slot.version += 1
            else:
                slot.give_to(UnownedContent.UNUSABLE)
        return erasures


def _last_use(slot: _Slot) -> int:
    return slot.last_use


def _owned_by(slots: Sequence[_Slot], owner: Owner) -> list[_Slot]:
    return [slot for slot in slots if slot.owner == owner]
