"""What of a piece of a recording is heard, by where voices were found in it."""

import pytest

from runner_svc.runtimes.faster_whisper.listening import voices_of
from runner_svc.runtimes.faster_whisper.recording import SAMPLE_RATE

PIECE = 180


def _span(found: list[tuple[int, int]], *, is_last: bool) -> tuple[float, float, float, bool]:
    voices = [{"start": begin * SAMPLE_RATE, "end": end * SAMPLE_RATE} for begin, end in found]
    span = voices_of(voices, PIECE * SAMPLE_RATE, is_last=is_last)
    return span.begin / SAMPLE_RATE, span.end / SAMPLE_RATE, span.used / SAMPLE_RATE, span.is_closed


@pytest.mark.parametrize(
    ("found", "is_last", "span"),
    [
        ([], True, (0, 0, 180, True)),
        # A voice may begin in the last moment.
        ([], False, (0, 0, 179, True)),
        ([(10, 20), (30, 40)], False, (10, 40, 40, True)),
        ([(10, 20), (30, 40)], True, (10, 40, 180, True)),
        # The last voice goes on in the next piece, which begins with it.
        ([(10, 20), (30, 180)], False, (10, 20, 30, True)),
        ([(10, 20), (30, 180)], True, (10, 180, 180, True)),
        # One voice over the end of the piece: it is cut as without a detector.
        ([(10, 180)], False, (10, 180, 180, False)),
        ([(10, 180)], True, (10, 180, 180, True)),
    ],
)
def test_recording_chunk_is_cut_at_silence(
    found: list[tuple[int, int]], is_last: bool, span: tuple[float, float, float, bool]
) -> None:
    assert _span(found, is_last=is_last) == span
