"""Detection of repetition, independent of the chunks."""

import random

import pytest
from kit.failures import fails
from kit.presence import present

from runner_svc.chat.turn import RepetitionWatch
from runner_svc.policy.repetition import Repetition, RepetitionDetector, RepetitionLimits, TextureLimits
from weft.api.common.v1 import chat_pb2, event_pb2
from weft.kernel.errors.reasons import Reason

MORE_SEEDS = pytest.mark.nightly("more of the same four texts")
LINE = "The lantern keeper counts the ships.\n"
CHECK = RepetitionLimits().check_characters


def _feed(
    text: str, sizes: list[int] | None = None, limits: RepetitionLimits | None = None
) -> tuple[int, Repetition] | None:
    """Returns the length of the text at which a loop was found, and the loop."""
    detector, place = RepetitionDetector(limits), 0
    rng = iter(sizes or [])
    while place < len(text):
        size = next(rng, 4)
        found = detector.feed(text[place : place + size])
        place = min(place + size, len(text))
        if found is not None:
            return place, found
    return None


def _prose(characters: int, seed: int = 1) -> str:
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(characters)]
    return " ".join(words)[:characters]


def test_line_is_a_loop_at_its_sixteenth_repetition_and_not_before() -> None:
    ending = "\n" + _prose(600)
    assert _feed(LINE * 15 + ending) is None
    found = present(_feed(LINE * 16 + ending))
    assert found[1] == Repetition(kind="line", sample=LINE.strip(), count=16)


def test_blank_lines_whitespace_and_list_numbers_do_not_hide_a_repeated_line() -> None:
    for text in (
        (LINE + "\n \n") * 30,
        "".join("  " * (n % 3) + LINE for n in range(30)),
        "".join(f"{n}. {LINE}" for n in range(30)),
        ("- " + LINE + "* " + LINE) * 15,
    ):
        found = present(_feed(text))
        assert found[1].kind == "line"


def test_different_line_resets_the_count() -> None:
    verses = "".join(LINE * 14 + _prose(300, seed) + "\n" for seed in range(30))
    assert _feed(verses) is None


@pytest.mark.parametrize("line", ["Hi!", "yes", "Say hi.", "ja ja", "- Hello", "好的"])
def test_short_lines_are_a_loop_after_many_repetitions(line: str) -> None:
    """Observed: `weft chat -m "Say hi"` ran to the end of the context."""
    found = present(_feed(_prose(600) + "\n" + f"{line}\n" * 200))
    assert (found[1].kind, found[1].count) == ("line", RepetitionLimits().short_lines)


@pytest.mark.parametrize(
    "text",
    [
        "yes\n" * 90 + "no\n" * 90,
        "```python\n" + "    pass\n" * 300 + "```\n",
        "0\n" * 400,
        "null\n" * 300,
        "});\n" * 300,
        "[\n" + "  true,\n" * 400 + "]\n",
        "ha " * 200 + "\n",
        "    \n" * 1000,
        "|   |\n" * 300,
    ],
    ids=["votes", "code", "zeros", "nulls", "closing", "json", "laughing", "white", "cells"],
)
def test_short_lines_of_votes_code_figures_and_marks_are_not_a_loop(text: str) -> None:
    assert _feed(text) is None


def test_sentence_loop_without_line_breaks_is_detected() -> None:
    found = present(_feed(_prose(900) + " I went to the market and bought bread." * 60))
    place, loop = found
    assert loop.kind == "text"
    assert loop.count >= 5
    assert place - 900 <= 1_200 + 64 + 2 * CHECK


def test_cycle_of_many_lines_is_detected() -> None:
    cycle = "".join(f"{_prose(70, seed)}.\n" for seed in range(25))
    found = present(_feed(cycle * 6))
    assert found[1].kind == "text"


def test_phrases_in_changing_order_are_detected_by_their_ngrams() -> None:
    rng = random.Random(1)
    phrases = [f"{_prose(60, seed)}. " for seed in range(4)]
    found = present(_feed("".join(rng.choice(phrases) for _ in range(400))))
    assert found[1].kind == "text"
    assert len(found[1].sample.split()) == 5


def test_code_tables_and_figures_may_repeat_more_than_prose() -> None:
    assert _feed("```python\n" + "    print('the value is')\n" * 40 + "```\n" + _prose(600)) is None
    assert _feed("| none | none | none |\n" * 40 + _prose(600)) is None
    assert _feed("[0, 0, 0, 0, 0, 0]\n" * 120 + _prose(600)) is None
    assert _feed("0, " * 2000 + _prose(600)) is None
    assert _feed("[\n" + '  {"name": "", "count": 0},\n' * 45 + "]\n" + _prose(600)) is None


def test_data_without_spaces_and_number_words_count_as_figures() -> None:
    for row in ("CAG" * 20 + "\n", "[null, null, null, null],\n", "None, None, NaN, true, false\n"):
        assert _feed(row * 60 + _prose(600)) is None
        assert _feed(row * 600) is not None


def test_short_period_stays_short_when_several_are_grouped() -> None:
    assert _feed("ha " * 900 + _prose(600)) is None
    assert _feed("hahaha" * 1200 + _prose(600)) is None
    assert _feed("ha " * 1400 + _prose(600)) is not None


def test_endless_code_table_and_figure_loops_are_still_detected() -> None:
    for piece in ("    print('the value is')\n", "| none | none | none |\n", "[0, 0, 0, 0, 0, 0]\n", "0, ", "="):
        assert _feed("```\n" + piece * 12_000) is not None


def test_only_text_inside_a_fence_is_code() -> None:
    assert _feed("```\n" + LINE * 40) is None
    assert _feed("```\n" + LINE * 60) is not None
    found = present(_feed("```\nx = 1\n```\n" + LINE * 40))
    assert found[1].count == 16


def test_loop_is_reported_once() -> None:
    detector = RepetitionDetector()
    verdicts = [detector.feed(LINE) for _ in range(500)]
    assert sum(verdict is not None for verdict in verdicts) == 1
    assert detector.feed(LINE * 100) is None


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=MORE_SEEDS) for seed in range(4, 12))])
def test_chunking_changes_neither_the_verdict_nor_its_position(seed: int) -> None:
    rng = random.Random(seed)
    text = {
        0: _prose(1000) + "\n" + LINE * 60,
        1: _prose(700) + " and so it went on" * 300,
        2: "```\n" + "    print('the value is')\n" * 200,
        3: "".join(rng.choice([_prose(50, 1), _prose(50, 2), _prose(60, 3)]) + ". " for _ in range(400)),
    }[seed % 4]
    whole = _feed(text, [len(text)])
    single = _feed(text, [1] * len(text))
    mixed = _feed(text, [rng.choice([0, 1, 2, 5, 40, 700]) for _ in range(len(text))])
    assert whole is not None
    assert single is not None
    assert mixed is not None
    assert whole[1] == single[1] == mixed[1]
    assert single[0] % CHECK == 0
    assert single[0] <= mixed[0] < single[0] + 700


def test_detector_state_is_bounded() -> None:
    limits = RepetitionLimits()
    detector = RepetitionDetector(limits)
    assert detector.feed(_prose(60_000).replace(" ", "_")) is None
    assert len(detector._window) == limits.window_characters
    assert len(detector._lines._partial) <= limits.window_characters
    assert sum(map(len, detector._waiting)) < limits.check_characters


def test_sample_starts_at_a_line_sentence_or_word() -> None:
    samples = []
    for piece in ("no way " * 3 + "out. ", "red and blue ", f"{_prose(40, 1)}\n{_prose(50, 2)}\n"):
        found = present(_feed(_prose(333) + piece * 300))
        samples.append(found[1].sample)
    first, second = _prose(40, 1), _prose(50, 2)
    assert samples[0] == "no way no way no way out."
    assert samples[1] in {"red and blue", "and blue red", "blue red and"}
    assert samples[2] in {f"{first}\n{second}", f"{second}\n{first}"}


def test_limits_are_configurable() -> None:
    strict = RepetitionLimits(prose=TextureLimits(lines=3, characters=1_200, repeats=5))
    assert _feed(LINE * 3 + _prose(300), limits=strict) is not None
    assert _feed(LINE * 2 + _prose(300), limits=strict) is None


def test_sample_is_short() -> None:
    found = present(_feed((_prose(600) + "\n") * 20))
    assert len(found[1].sample) == 200


def _frame(*choices: int, lines: int = 1) -> list[event_pb2.InferenceEvent]:
    deltas = [event_pb2.Delta(index=choice, text=LINE) for choice in choices for _ in range(lines)]
    return [event_pb2.InferenceEvent(delta=delta) for delta in deltas]


def test_two_looping_choices_in_one_frame_are_both_reported() -> None:
    watch = RepetitionWatch(chat_pb2.ChatPayload(), kills=False)
    found = [watch.look(_frame(0, 1, lines=40)), *(watch.look(_frame(0, 1)) for _ in range(40))]
    assert [warning is not None for warning in found[:2]] == [True, True]
    assert not any(found[2:])


def test_interleaved_choices_do_not_hide_a_loop() -> None:
    watch = RepetitionWatch(chat_pb2.ChatPayload(), kills=True)
    other = event_pb2.InferenceEvent(delta=event_pb2.Delta(index=1, text="Another one."))
    with fails(Reason.REPEATED_LINE_LOOP):
        watch.look([*_frame(0), other] * 40)


def test_events_without_text_are_ignored() -> None:
    watch = RepetitionWatch(chat_pb2.ChatPayload(), kills=True)
    usage = event_pb2.InferenceEvent()
    usage.usage.prompt_tokens = 1
    assert watch.look([usage, event_pb2.InferenceEvent(delta=event_pb2.Delta())]) is None
