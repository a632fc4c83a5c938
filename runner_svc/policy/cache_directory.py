"""Whose prefix is in which slot of an engine, and which slot a turn works in so that nobody sees another's.

Two kinds of turns are told apart. A *placed* one works in the slot that the book names. A *loose* one works where the
engine likes: it may leave its text in any slot that is idle while it lasts. Embeddings are loose (llama.cpp's server
takes no slot for them, and their text is a cached prefix for completions afterwards: measured), and so are turns with
several choices, whose further choices take further slots.

While one partition alone has used an engine, all its turns are loose: the engine knows best which of its slots has the
longest prefix of a prompt. From the first turn of another partition on the book places them.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

MAX_CACHE_SLOTS = 1_024


@dataclass(frozen=True, slots=True)
class Partition:
    """Requests that may share cached prefixes: those of one tenant with one tag."""

    tenant: str
    tag: str = ""

    def is_meant(self, tenant: str | None, tag: str | None) -> bool:
        """Whether it is of this tenant and tag; None: of any."""
        return tenant in (None, self.tenant) and tag in (None, self.tag)


class UnownedContent(Enum):
    """What a slot holds when it is nobody's in particular."""

    NOTHING = "nothing"
    """It is empty."""
    FOR_NOBODY = "for nobody"
    """Text of several partitions, or of a request that shares with nobody, or text that is to be forgotten."""


Owner = Partition | UnownedContent


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTurn:
    """How one turn of an engine may use the cache; to be given back with `CacheDirectory.end`."""

    number: int
    """Counts the turns of this book."""
    slot: int | None
    """Work in this slot; None: where the engine likes."""
    fresh: bool
    """Nothing that is cached may be used."""


@dataclass(frozen=True, slots=True)
class SlotState:
    """A slot, and which state of it is meant."""

    slot: int
    version: int


@dataclass(slots=True)
class _Slot:
    number: int
    owner: Owner = UnownedContent.NOTHING
    marks: tuple[bytes, ...] = ()
    last_use: int = 0
    version: int = 0
    turn: CacheTurn | None = None
    forget: bool = False
    """Whether what is in it is to be forgotten when it comes free."""

    def give_to(self, owner: Owner, marks: tuple[bytes, ...] = ()) -> None:
        self.owner, self.marks = owner, marks
        self.version += 1

    def erasure(self) -> SlotState:
        self.give_to(UnownedContent.FOR_NOBODY)
        return SlotState(self.number, self.version)

    def common_marks(self, marks: Sequence[bytes]) -> int:
        count = 0
        for mine, theirs in zip(self.marks, marks, strict=False):
            if mine != theirs:
                break
            count += 1
        return count


@dataclass(slots=True)
class CacheDirectory:
    """The slots of one engine's life. No turn is refused; while a slot is free it gets one, or the engine's choice.

    A turn whose partition is None shares with nobody.
    """

    slot_count: int
    _slots: list[_Slot] = field(init=False)
    _loose: dict[int, Partition | None] = field(default_factory=dict)
    """Loose turns under way, and whose text they leave."""
    _only: Partition | None = None
    """The first partition that used this engine."""
    _several: bool = False
    _unsure: bool = False
    """Whether a loose turn has ended that may have worked in any slot."""
    _turns: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.slot_count <= MAX_CACHE_SLOTS:
            raise ValueError(f"an engine has 1 to {MAX_CACHE_SLOTS} slots, not {self.slot_count}")
        self._slots = [_Slot(number) for number in range(self.slot_count)]

    def is_alone(self, partition: Partition | None) -> bool:
        """Whether a turn of this partition may be left to the engine: there is nothing that it must not see."""
        partition = self._known(partition)
        if partition is None or self._several or self._only not in (None, partition):
            return False
        for loose in self._loose.values():
            if loose is not partition and loose != partition:
                return False
        for slot in self._slots:
            owner = slot.owner
            if owner is not partition and owner is not UnownedContent.NOTHING and owner != partition:
                return False
        return True

    @property
    def wants_a_look(self) -> bool:
        """Whether the engine knows more of its slots than the book; see `begin` and `emptied`."""
        return self._unsure or bool(self._loose)

    def states(self) -> tuple[SlotState, ...]:
        """The state of every slot, for `emptied` after a look at the engine."""
        return tuple(SlotState(slot.number, slot.version) for slot in self._slots)

    def owner_of(self, slot: int) -> Owner:
        """What a slot holds, as far as the book knows; of one in use, what it will hold."""
        return self._slots[slot].owner

    def begin(
        self,
        partition: Partition | None,
        marks: Sequence[bytes] = (),
        *,
        spreads: bool = False,
        busy: Collection[int] = (),
    ) -> CacheTurn:
        """A turn begins.

        `marks`: digests of ever longer beginnings of its prompt; empty: unknown. `spreads`: it takes more slots of the
        engine than one. `busy`: slots that the engine is seen to work in; they are not avoided at any price.
        """
        partition = self._known(partition)
        if self.is_alone(partition):
            return self.begin_loose(partition)
        self._note(partition)
        slot = self._choose(partition, marks, busy)
        if slot is None:
            return self._loosen(self._next_turn(None, fresh=True), partition)
        turn = self._next_turn(slot.number, fresh=self._is_foreign(slot, partition))
        slot.turn = turn
        slot.give_to(UnownedContent.FOR_NOBODY if partition is None else partition, tuple(marks))
        return self._loosen(turn, partition) if spreads else turn

    def begin_loose(self, partition: Partition | None) -> CacheTurn:
        """A turn begins that the engine runs where it likes, whatever it is told, such as an embedding."""
        partition = self._known(partition)
        self._note(partition)
        return self._loosen(self._next_turn(None, fresh=partition is None), partition)

    def end(self, turn: CacheTurn, *, worked: bool, touched: Collection[int] | None = None) -> tuple[SlotState, ...]:
        """A turn has ended, however. Returns what is to be erased now.

        `worked`: whether the engine is known to have worked on its prompt; otherwise its slot may hold what it held
        before. `touched`: the slots that a loose turn can have worked in; None: all.
        """
        erasures: list[SlotState] = []
        if turn.slot is not None:
            erasures += self._leave(self._slots[turn.slot], turn, worked=worked)
        if turn.number in self._loose:
            erasures += self._spill(self._loose.pop(turn.number), touched)
        return tuple(erasures)

    def forget(self, tenant: str | None = None, tag: str | None = None) -> tuple[SlotState, ...]:
        """Forget what belongs to this tenant and tag, None: to any. Returns what is to be erased now.

        From here on nobody is shown any of it. Slots in use are forgotten when they come free.
        """
        for number, partition in self._loose.items():
            if partition is not None and partition.is_meant(tenant, tag):
                self._loose[number] = None
        erasures: list[SlotState] = []
        for slot in self._slots:
            if slot.owner is UnownedContent.NOTHING:
                continue
            if isinstance(slot.owner, Partition) and not slot.owner.is_meant(tenant, tag):
                continue
            if slot.turn is None:
                erasures.append(slot.erasure())
            else:
                slot.forget = True
        return tuple(erasures)

    def emptied(self, states: Sequence[SlotState]) -> None:
        """These slots are known to have been empty; one that something was done with meanwhile is left as it is.

        A loose turn under way may have left its text there all the same: `_is_foreign` and `_spill` reckon with that.
        """
        for state in states:
            slot = self._slots[state.slot]
            if slot.version == state.version and slot.turn is None:
                slot.give_to(UnownedContent.NOTHING)

    def looked(self) -> None:
        """The engine was looked at, and `emptied` was told."""
        self._unsure = False

    def _known(self, partition: Partition | None) -> Partition | None:
        """The partition as the slots have it: two that are one object are soon compared, and there are many slots."""
        return self._only if partition == self._only else partition

    def _note(self, partition: Partition | None) -> None:
        if partition is not None:
            self._several = self._several or self._only not in (None, partition)
            self._only = self._only or partition

    def _next_turn(self, slot: int | None, *, fresh: bool) -> CacheTurn:
        self._turns += 1
        return CacheTurn(number=self._turns, slot=slot, fresh=fresh)

    def _loosen(self, turn: CacheTurn, partition: Partition | None) -> CacheTurn:
        self._loose[turn.number] = partition
        return turn

    def _is_foreign(self, slot: _Slot, partition: Partition | None) -> bool:
        """Whether a slot may hold what a partition must not see, now or when its turn gets there."""
        if partition is None or any(loose != partition for loose in self._loose.values()):
            return True
        return slot.owner not in (UnownedContent.NOTHING, partition)

    def _choose(self, partition: Partition | None, marks: Sequence[bytes], busy: Collection[int]) -> _Slot | None:
        free = [slot for slot in self._slots if slot.turn is None]
        free = [slot for slot in free if slot.number not in busy] or free
        if not free:
            return None
        own = [slot for slot in free if partition is not None and slot.owner == partition]
        # Of several with equally long beginnings the oldest: what another one holds beyond it may be asked for sooner.
        best = max(own, key=lambda slot: (slot.common_marks(marks), -slot.last_use), default=None)
        if best is not None and best.common_marks(marks):
            return best
        unknown = own if not marks else [slot for slot in own if not slot.marks]
        if unknown:
            return max(unknown, key=_last_use)
        # Nobody's slots first, then the partition's own: many prompts of one must not drive out everybody else's.
        for owned in (_owned_by(free, UnownedContent.NOTHING), _owned_by(free, UnownedContent.FOR_NOBODY), own, free):
            if owned:
                return min(owned, key=_last_use)
        return None

    def _leave(self, slot: _Slot, turn: CacheTurn, *, worked: bool) -> list[SlotState]:
        slot.turn, slot.last_use = None, turn.number
        must_forget, slot.forget = slot.forget, False
        if must_forget or slot.owner is UnownedContent.FOR_NOBODY:
            return [slot.erasure()]
        if turn.fresh and not worked:
            # Whatever was in it before may be there still.
            slot.give_to(UnownedContent.FOR_NOBODY)
        return []

    def _spill(self, partition: Partition | None, touched: Collection[int] | None) -> list[SlotState]:
        """A loose turn is over: it may have left its text wherever nobody placed was at work."""
        self._unsure = self._unsure or touched is None
        erasures: list[SlotState] = []
        for slot in self._slots:
            if slot.turn is not None or (touched is not None and slot.number not in touched):
                continue
            if partition is None:
                erasures.append(slot.erasure())
            elif slot.owner is partition or slot.owner in (UnownedContent.NOTHING, partition):
                slot.owner = partition
                slot.version += 1
            else:
                slot.give_to(UnownedContent.FOR_NOBODY)
        return erasures


def _last_use(slot: _Slot) -> int:
    return slot.last_use


def _owned_by(slots: Sequence[_Slot], owner: Owner) -> list[_Slot]:
    return [slot for slot in slots if slot.owner == owner]
