"""The text that can be shown during a generation."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner_svc.engine_host.text_routes import StopMatcher


def _run(pieces: list[bytes], stop: list[str]) -> tuple[list[str], bool]:
    matcher = StopMatcher(stop)
    shown = [matcher.feed(piece) for piece in pieces]
    return [*shown, matcher.finish()], matcher.stopped


@pytest.mark.parametrize(
    ("pieces", "stop", "shown", "stopped"),
    [
        ([b"a", b"b"], [], ["a", "b", ""], False),
        ([b"a", b"EN", b"D", b"x"], ["END"], ["a", "", "", "", ""], True),
        ([b"aEN", b"b"], ["END"], ["a", "ENb", ""], False),
        ([b"aEN"], ["END"], ["a", "EN"], False),
        ([b"EEND"], ["END"], ["E", ""], True),
        ([b"one two"], ["two", "one"], ["", ""], True),
        ([b"ab", b"abc"], ["ababc"], ["", "", ""], True),
        ([b"\xe2\x98", b"\x83", b"!"], [], ["", "\u2603", "!", ""], False),
        ([b"\xe2", b"x"], [], ["", "\ufffdx", ""], False),
        ([b"\xe2\x98"], [], ["", "\ufffd"], False),
        ([b"a"], [""], ["a", ""], False),
    ],
)
def test_text_is_shown_as_soon_as_it_is_certain(
    pieces: list[bytes], stop: list[str], shown: list[str], stopped: bool
) -> None:
    assert _run(pieces, stop) == (shown, stopped)


@given(
    text=st.text(alphabet="ab\u2603", max_size=30),
    stop=st.lists(st.text(alphabet="ab\u2603", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 90), max_size=10),
)
def test_text_ends_before_the_first_completed_stop_string_for_any_chunking(
    text: str, stop: list[str], cuts: list[int]
) -> None:
    raw = text.encode()
    places = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    pieces = [raw[begin:end] for begin, end in pairwise(places)]
    shown, stopped = _run(pieces, stop)
    joined = "".join(shown)
    assert stopped == any(word in text for word in stop)
    assert text.startswith(joined)
    assert not any(word in joined for word in stop)
    if not stopped:
        assert joined == text
