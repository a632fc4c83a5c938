"""The cache directory: single decisions about slots, and random turns on a model of an engine."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.calls import calls_of
from kit.presence import present

from runner_svc.policy import cache_directory
from runner_svc.policy.cache_directory import (
    CacheDirectory,
    CacheTurn,
    LostPrompt,
    Partition,
    SlotState,
    UnownedContent,
)
from runner_svc.policy.kept_prompts import KeptPrompt, KeptPrompts

A, B, C = Partition("a"), Partition("b"), Partition("c")
A_TAGGED = Partition("a", "tag")


def _turn(book: CacheDirectory, partition: Partition | None, *marks: bytes) -> CacheTurn:
    turn = book.begin(partition, marks)
    book.end(turn, worked=True)
    return turn


def _shared_book(slot_count: int) -> CacheDirectory:
    """Returns a directory that two tenants have used, with slots known to be empty."""
    book = CacheDirectory(slot_count)
    _turn(book, A)
    _turn(book, B)
    book.emptied(book.forget())
    return book


def test_single_tenant_uses_slots_chosen_by_the_engine() -> None:
    book = CacheDirectory(2)
    turns = [_turn(book, A) for _ in range(3)]
    assert [(turn.slot, turn.fresh) for turn in turns] == [(None, False)] * 3


def test_second_and_later_tenants_are_assigned_to_slots() -> None:
    book = CacheDirectory(2)
    _turn(book, A)
    second = _turn(book, B)
    assert second.slot is not None
    assert second.fresh
    assert _turn(book, A).slot not in (None, second.slot)


@pytest.mark.parametrize("tenants", [(A,), (A, B)])
def test_beginning_a_turn_calls_nothing_per_slot(tenants: tuple[Partition, ...]) -> None:
    def calls(slot_count: int) -> list[str]:
        book = CacheDirectory(slot_count)
        for each in tenants:
            _turn(book, each, b"1")
        return calls_of(lambda: book.begin(A, (b"1",)))

    assert calls(64) == calls(2)


def test_turn_ahead_of_requests_gets_only_slots_without_text_that_a_request_may_use() -> None:
    """It took a slot of another tenant, whose text was lost when a request interrupted it."""
    for keeps in (False, True):
        book = CacheDirectory(2, keeps=keeps)
        begun = present(book.begin_ahead(B, (b"b",)))
        assert (begun.slot, begun.fresh) == (0, True)
        assert book.is_alone(B)
        book.end(begun, worked=False)
        again = present(book.begin_ahead(B, (b"b",)))
        assert again.slot == 0
        book.end(again, worked=True)
        _turn(book, A, b"a")
        assert book.begin_ahead(C, (b"c",)) is None
        assert book.begin_ahead(A, (b"a",)) is None
        _turn(book, B, b"b", b"more")
        assert book.begin_ahead(B, (b"b",)) is None


def test_turn_ahead_replaces_another_one_of_its_partition_only_if_its_text_is_saved() -> None:
    """On an engine with one slot, the least recently used agent's prompt was left."""
    marks = [(b"1", b"2", b"3"), (b"4", b"5", b"6"), (b"7", b"8", b"9")]
    saved = []
    for keeps in (False, True):
        book = CacheDirectory(1, keeps=keeps)
        turns = []
        for partition, prompt in ((A, marks[0]), (A, marks[1]), (B, marks[2])):
            turn = book.begin_ahead(partition, prompt)
            if turn is not None:
                book.end(turn, worked=True)
            turns.append(turn)
        assert turns[0] is not None
        assert turns[2] is None
        saved.append(turns[1] and turns[1].loses)
    assert saved == [None, LostPrompt(A, marks[0])]


def test_slot_that_a_loose_turn_may_have_used_is_not_replaced_ahead() -> None:
    book = CacheDirectory(1)
    begun = present(book.begin_ahead(A, (b"a",)))
    book.end(begun, worked=False)
    assert _turn(book, A).slot is None
    assert book.begin_ahead(A, (b"a",)) is None


def test_tag_is_isolated_like_another_tenant() -> None:
    book = CacheDirectory(2)
    _turn(book, A)
    assert _turn(book, A_TAGGED).fresh


def test_tenant_takes_its_own_slot_during_an_unshared_turn_and_later_the_erased_one() -> None:
    book = _shared_book(2)
    mine = _turn(book, A, b"mine")
    unshared = book.begin(None, (b"other",))
    assert (unshared.slot, unshared.fresh) == (1 - (mine.slot or 0), True)
    meanwhile = book.begin(A, (b"other",))
    assert (meanwhile.slot, meanwhile.fresh) == (mine.slot, False)
    book.end(meanwhile, worked=True)
    book.emptied(book.end(unshared, worked=True))
    assert book.begin(A, (b"third",)).slot == unshared.slot


def test_slot_with_the_longest_common_prefix_is_chosen() -> None:
    book = _shared_book(3)
    long, short = _turn(book, A, b"1", b"2", b"3"), _turn(book, A, b"9")
    assert long.slot != short.slot
    assert _turn(book, A, b"1", b"2", b"x").slot == long.slot
    assert _turn(book, A, b"9", b"8").slot == short.slot


def test_many_prompts_of_one_tenant_do_not_evict_another_tenant() -> None:
    book = _shared_book(2)
    mine = _turn(book, A, b"mine")
    for number in range(5):
        assert _turn(book, B, b"%d" % number).slot != mine.slot
    again = _turn(book, A, b"mine")
    assert (again.slot, again.fresh) == (mine.slot, False)


def test_least_recently_used_slot_is_taken_from_another_tenant() -> None:
    book = _shared_book(2)
    oldest = _turn(book, A)
    _turn(book, B)
    taken = _turn(book, C)
    assert (taken.slot, taken.fresh) == (oldest.slot, True)


def test_slot_in_use_is_not_assigned() -> None:
    book = _shared_book(2)
    turns = [book.begin(A), book.begin(A), book.begin(A)]
    assert {turn.slot for turn in turns[:2]} == {0, 1}
    assert turns[2].slot is None
    assert turns[2].fresh


def test_slot_busy_in_the_engine_is_avoided_if_possible() -> None:
    book = _shared_book(2)
    first = book.begin(B, busy=[0])
    assert first.slot == 1
    assert book.begin(B, busy=[0]).slot == 0


def test_private_turn_starts_fresh_and_its_slot_is_erased_afterwards() -> None:
    book = CacheDirectory(2)
    _turn(book, A)
    private = book.begin(None)
    assert private.fresh
    assert private.slot is not None
    erasures = book.end(private, worked=True)
    assert [state.slot for state in erasures] == [private.slot]
    assert not book.is_alone(A)
    book.emptied(erasures)
    assert book.is_alone(A)


def test_fresh_turn_that_never_reached_the_engine_leaves_the_slot_unowned() -> None:
    book = CacheDirectory(1)
    _turn(book, A)
    book.end(book.begin(B), worked=False)
    assert book.owner_of(0) is UnownedContent.UNUSABLE
    assert book.begin(B).fresh


def test_slot_used_during_its_erasure_is_not_marked_empty() -> None:
    book = _shared_book(1)
    _turn(book, A)
    erasures = book.forget("a")
    _turn(book, B)
    book.emptied(erasures)
    assert book.owner_of(0) == B


def test_forgetting_one_tenant_keeps_the_slots_of_others() -> None:
    book = _shared_book(3)
    a, b, tagged = _turn(book, A), _turn(book, B), _turn(book, A_TAGGED)
    assert {state.slot for state in book.forget("a", "tag")} == {tagged.slot}
    assert {state.slot for state in book.forget("a")} == {a.slot, tagged.slot}
    assert not _turn(book, B).fresh
    assert b.slot is not None


def test_slot_in_use_is_forgotten_when_freed() -> None:
    book = _shared_book(1)
    running = book.begin(A)
    assert book.forget("a") == ()
    assert [state.slot for state in book.end(running, worked=True)] == [running.slot]
    assert _turn(book, A).fresh


@dataclass(frozen=True)
class _Text:
    """The text that a turn leaves in a slot."""

    partition: Partition | None
    turn: int


@dataclass
class _Running:
    turn: CacheTurn
    text: _Text
    is_embedding: bool
    is_loose: bool
    forgotten: set[_Text]
    """The texts that were forgotten before it began."""
    has_arrived: bool = False


@dataclass
class _Engine:
    """A model of an engine: slots with texts, and the texts that a turn must not see."""

    book: CacheDirectory
    contents: list[_Text | None]
    forgotten: set[_Text] = field(default_factory=set)
    running: list[_Running] = field(default_factory=list)
    erasing: list[tuple[SlotState, ...]] = field(default_factory=list)
    texts: int = 0
    reused: int = 0
    restored: int = 0
    kept: KeptPrompts = field(default_factory=lambda: KeptPrompts(budget_bytes=3))
    files: dict[str, _Text | None] = field(default_factory=dict)

    def begin(self, partition: Partition | None, *, arrives: bool, loose: bool, spreads: bool) -> None:
        self.texts += 1
        text = _Text(partition, self.texts)
        turn = self.book.begin_loose(partition) if loose else self._begin_placed(partition, spreads=spreads)
        is_loose = turn.slot is None or spreads
        held = {other.turn.slot for other in self.running if other.turn.slot is not None}
        assert turn.slot not in held
        if turn.slot is None and not loose and not self.book.is_alone(partition):
            assert len(held) == len(self.contents), "a slot is free"
        self.running.append(_Running(turn, text, loose, is_loose, set(self.forgotten)))
        # While one partition is alone, its turns are not ordered: the next partition's first one has to end before one
        # arrives to be seen.
        if arrives or (turn.slot is None and not turn.fresh and not loose):
            self.arrive(len(self.running) - 1)

    def arrive(self, which: int) -> None:
        """A turn arrives at the engine, unless it has to wait for earlier ones."""
        if not self.running:
            return
        arrived = self.running[which % len(self.running)]
        awaited = {running.turn.number for running in self.running if not running.has_arrived}
        if arrived.has_arrived or arrived.turn.after & awaited:
            return
        arrived.has_arrived = True
        turn = arrived.turn
        seen = self.contents if turn.slot is None else [self.contents[turn.slot]]
        if not turn.fresh and not arrived.is_embedding:
            for content in filter(None, seen):
                assert content.partition is not None
                assert content.partition == arrived.text.partition
                assert content not in arrived.forgotten
                self.reused += 1
        if turn.slot is not None:
            self.contents[turn.slot] = arrived.text

    def _begin_placed(self, partition: Partition | None, *, spreads: bool) -> CacheTurn:
        """Begin a turn of one of four conversations, with what a keeper of prompts does for it."""
        if not self.book.keeps:
            return self.book.begin(partition, spreads=spreads)
        marks = tuple(bytes([self.texts % 4, length]) for length in range(3))
        found, kept_marks = self.kept.best(partition, marks)
        turn = self.book.begin(partition, marks, spreads=spreads, kept_marks=kept_marks)
        if turn.loses is not None and turn.slot is not None:
            lost = self.contents[turn.slot]
            assert lost is None or (lost.partition == turn.loses.partition and lost not in self.forgotten)
            name = str(self.texts)
            self.files[name] = lost
            self.kept.add(KeptPrompt(name=name, partition=turn.loses.partition, marks=turn.loses.marks, byte_count=1))
        if turn.restores and found is not None and turn.slot is not None:
            self.restored += 1
            self.contents[turn.slot] = self.files[found.name]
            return replace(turn, fresh=False)
        return turn

    def write(self, which: int, slot: int) -> None:
        """A loose turn writes into a slot that no placed one works in."""
        arrived = [running for running in self.running if running.has_arrived]
        loose = [running for running in arrived if running.is_loose]
        if loose and all(running.turn.slot != slot for running in arrived):
            self.contents[slot] = loose[which % len(loose)].text

    def end(self, which: int, *, worked: bool) -> None:
        if not self.running:
            return
        ended = self.running.pop(which % len(self.running))
        slot = ended.turn.slot
        has_worked = worked and slot is not None and self.contents[slot] == ended.text
        touched = None if ended.has_arrived else ()
        self.erasing.append(self.book.end(ended.turn, worked=has_worked, touched=touched))

    def forget(self, tenant: str | None, tag: str | None) -> None:
        self.kept.forget(tenant, tag)
        cached = [*self.contents, *self.files.values()]
        texts = [content for content in cached if content] + [running.text for running in self.running]
        self.forgotten |= {text for text in texts if text.partition and text.partition.is_meant(tenant, tag)}
        self.erasing.append(self.book.forget(tenant, tag))

    def erase(self) -> None:
        """Carry out the oldest requested erasure; a busy slot is waited for."""
        if not self.erasing:
            return
        states = self.erasing.pop(0)
        at_work = {running.turn.slot for running in self.running}
        done = [state for state in states if state.slot not in at_work]
        for state in done:
            self.contents[state.slot] = None
        self.book.emptied(done)

    def look(self) -> None:
        states = self.book.states()
        self.book.emptied([state for state in states if self.contents[state.slot] is None])
        self.book.note_snapshot()


_PARTITIONS = st.sampled_from([A, A, B, C, A_TAGGED, None])
_BEGIN = st.tuples(st.just("begin"), _PARTITIONS, st.booleans(), st.sampled_from([0, 0, 0, 1, 2]))
_ARRIVE = st.tuples(st.just("arrive"), st.integers(0, 7))
_WRITE = st.tuples(st.just("write"), st.integers(0, 7), st.integers(0, 3))
_END = st.tuples(st.just("end"), st.integers(0, 7), st.booleans())
_FORGET = st.tuples(st.just("forget"), st.sampled_from(["a", "b", None]), st.sampled_from(["tag", None]))
_REST = st.tuples(st.sampled_from(["erase", "look"]))
_STEPS = st.lists(st.one_of(_BEGIN, _BEGIN, _ARRIVE, _END, _END, _WRITE, _FORGET, _REST), max_size=60)


def _run(
    steps: list[tuple[object, ...]], slots: int, make_book: Callable[[int], CacheDirectory] = CacheDirectory
) -> _Engine:
    engine = _Engine(make_book(slots), [None] * slots)
    for step in steps:
        match step:
            case ("begin", partition, bool(arrives), kind) if partition is None or isinstance(partition, Partition):
                engine.begin(partition, arrives=arrives, loose=kind == 1, spreads=kind == 2)
            case ("arrive", int(which)):
                engine.arrive(which)
            case ("write", int(which), int(slot)):
                engine.write(which, slot % slots)
            case ("end", int(which), bool(worked)):
                engine.end(which, worked=worked)
            case ("forget", tenant, tag):
                engine.forget(tenant, tag)  # type: ignore[arg-type]  # as the strategies have it
            case ("erase",):
                engine.erase()
            case _:
                engine.look()
    return engine


@given(_STEPS, st.integers(1, 4))
def test_no_turn_sees_foreign_content(steps: list[tuple[object, ...]], slots: int) -> None:
    _run(steps, slots)


def _keeping(slots: int) -> CacheDirectory:
    return CacheDirectory(slots, keeps=True)


@given(_STEPS, st.integers(1, 4))
def test_no_turn_sees_a_foreign_cached_prompt(steps: list[tuple[object, ...]], slots: int) -> None:
    _run(steps, slots, _keeping)


def test_text_of_a_turn_flushed_while_running_is_not_shown_to_the_next_one() -> None:
    _run([("begin", C, True, 0), ("forget", None, None), ("begin", C, True, 0)], 1, _keeping)
    loose: list[tuple[object, ...]] = [("begin", C, True, 1), ("write", 0, 0), ("forget", None, None), ("end", 0, True)]
    _run([*loose, ("begin", C, True, 0)], 1)


def test_turn_is_not_alone_beside_a_loose_one_whose_text_was_flushed() -> None:
    book = CacheDirectory(1)
    book.begin_loose(C)
    assert book.is_alone(C)
    book.forget()
    assert not book.is_alone(C)


def test_alternating_conversations_find_their_cached_prompts() -> None:
    steps: list[tuple[object, ...]] = []
    for partition in (A, A, A, B) * 8:
        steps += [("begin", partition, True, 0), ("end", 0, True)]
    assert _run(steps, 2, _keeping).restored >= 4


def test_second_turn_does_not_see_a_slot_the_first_has_not_reached() -> None:
    private: list[tuple[object, ...]] = [("begin", None, True, 0), ("end", 0, False)]
    _run([*private, ("begin", A, False, 0), ("begin", A, True, 0)], 1)


def test_turns_of_one_tenant_share_their_cache() -> None:
    steps: list[tuple[object, ...]] = []
    for partition in (A, B) * 4:
        steps += [("begin", partition, True, 0), ("end", 0, True)]
    assert _run(steps, 2).reused >= 4


class _NeverFresh(CacheDirectory):
    def begin(self, *args: object, **options: object) -> CacheTurn:
        return replace(super().begin(*args, **options), fresh=False)  # type: ignore[arg-type]  # handed on as it is


class _TrustsEveryEnd(CacheDirectory):
    def end(self, turn: CacheTurn, *, worked: bool, touched: object = None) -> tuple[SlotState, ...]:
        del worked, touched
        return super().end(turn, worked=True)


class _IgnoresLooseTurns(CacheDirectory):
    def end(self, turn: CacheTurn, *, worked: bool, touched: object = None) -> tuple[SlotState, ...]:
        del touched
        return super().end(turn, worked=worked, touched=())


class _ForgetsNothing(CacheDirectory):
    def forget(self, tenant: str | None = None, tag: str | None = None) -> tuple[SlotState, ...]:
        del tenant, tag
        return ()


class _TakesEverythingForEmpty(CacheDirectory):
    def emptied(self, states: object) -> None:
        del states
        super().emptied(self.states())


class _LetsLooseTurnsOvertake(CacheDirectory):
    def begin_loose(self, partition: Partition | None) -> CacheTurn:
        return replace(super().begin_loose(partition), after=frozenset())


_A_ONCE: list[tuple[object, ...]] = [("begin", A, True, 0), ("write", 0, 0), ("end", 0, True)]
_B_ONCE: list[tuple[object, ...]] = [("begin", B, True, 0), ("end", 0, True)]
_WRONG_BOOKS: list[tuple[type[CacheDirectory], list[tuple[object, ...]]]] = [
    (_NeverFresh, [*_A_ONCE, *_B_ONCE]),
    (_TrustsEveryEnd, [*_A_ONCE, ("begin", B, False, 0), ("end", 0, False), *_B_ONCE]),
    (_IgnoresLooseTurns, [*_A_ONCE, *_B_ONCE, ("begin", A, True, 1), ("write", 0, 0), ("end", 0, True), *_B_ONCE]),
    (
        _LetsLooseTurnsOvertake,
        [
            *_B_ONCE,
            *_A_ONCE,
            ("begin", A, False, 0),
            ("begin", B, True, 1),
            ("write", 0, 0),
            ("end", 1, True),
            ("arrive", 0),
        ],
    ),
    (_ForgetsNothing, [*_A_ONCE, ("forget", "a", None), ("begin", A, True, 0)]),
    (_TakesEverythingForEmpty, [*_A_ONCE, ("forget", "a", None), ("erase",), ("begin", A, True, 0)]),
]


@pytest.mark.parametrize(("wrong", "steps"), _WRONG_BOOKS)
def test_model_detects_faulty_cache_directories(wrong: type[CacheDirectory], steps: list[tuple[object, ...]]) -> None:
    """The control: each directory lacks one precaution."""
    _run(steps, 1)
    with pytest.raises(AssertionError):
        _run(steps, 1, wrong)


def test_turn_in_an_empty_slot_reads_no_cache() -> None:
    """A loose turn that began later reached the engine first on a busy machine: another tenant's prompt was found."""
    book = CacheDirectory(2)
    for partition in (A, B):
        book.end(book.begin(partition), worked=True)
    book.emptied(book.states())
    assert book.begin(C).fresh
    assert _keeping(1).begin(A).fresh, "the first one of an engine that just started"


def test_loose_turn_waits_for_placed_ones_of_other_tenants_that_began_earlier() -> None:
    """It took the slot of one on its way to the engine, which then found the other tenant's text there."""
    book = _shared_book(3)
    a, b = book.begin(A), book.begin(B)
    assert book.begin_loose(B).after == {a.number}
    assert (a.after, b.after) == (frozenset(), frozenset())
    assert book.begin(C, spreads=True).after == {a.number, b.number}
    book.end(a, worked=True)
    assert book.begin_loose(C).after == {b.number}


def test_number_of_slots_is_bounded() -> None:
    assert CacheDirectory(cache_directory.MAX_CACHE_SLOTS).slot_count == cache_directory.MAX_CACHE_SLOTS
    with pytest.raises(ValueError, match="slots"):
        CacheDirectory(cache_directory.MAX_CACHE_SLOTS + 1)
