"""The program espeak-ng as a speaker, over programs of the test."""

import struct
from pathlib import Path

import pytest
from recorded_caller import RecordedCaller

from runner_svc.engine_host.http_server import FAILED, GoneError, RefusedError
from runner_svc.engine_host.speech import SpeechRequest
from runner_svc.runtimes.espeak_ng.speaker import (
    EspeakSpeaker,
    listed_variants,
    listed_voices,
    rate_of,
    words_per_minute,
)

TABLE = """Pty Language       Age/Gender VoiceName          File                 Other Languages
 5  af              --/M      Afrikaans          gmw/af
 2  en-gb           --/M      English_(Great_Britain) gmw/en            (en 2)
 5  en-gb           --/M      english-mb-en1     mb/mb-en1
 5  yue             --/M      Chinese_(Cantonese) sit/yue              (zh-yue 5)
 5  yue             --/M      Chinese_(Cantonese,_latin_as_Jyutping) sit/yue-x
 5  --flag          --/M      Flag               gmw/flag
nonsense
"""
VARIANTS = """Pty Language       Age/Gender VoiceName          File                 Other Languages
 5  variant         --/F      female3            !v/f3
 5  variant         --/M      Adam               !v/adam
"""
HEADER = struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", 0, b"WAVE", b"fmt ", 16, 1, 1, 22050, 44100, 2, 16, b"data", 0)


def test_voices_are_the_listed_languages_without_mbrola() -> None:
    assert [(row.voice.name, row.voice.aliases, row.file) for row in listed_voices(TABLE)] == [
        ("af", ["Afrikaans"], "gmw/af"),
        ("en-gb", ["English_(Great_Britain)"], "gmw/en"),
        ("yue", ["Chinese_(Cantonese)"], "sit/yue"),
    ]
    assert listed_variants(VARIANTS) == ["f3", "adam"]


@pytest.mark.parametrize(("speed", "words"), [(1.0, 175), (2.0, 350), (0.25, 80), (4.0, 700)])
def test_speed_is_words_per_minute_within_the_program_limits(speed: float, words: int) -> None:
    assert words_per_minute(175, speed) == words


def test_sample_rate_comes_from_the_header_and_other_headers_are_refused() -> None:
    assert rate_of(HEADER) == 22050
    assert rate_of(HEADER[:20]) is None
    assert rate_of(b"x" * 44) is None


def _program(folder: Path, speaks: str) -> str:
    """Writes a program that lists the voices, and does `speaks` with a text."""
    (folder / "table").write_text(TABLE)
    (folder / "variants").write_text(VARIANTS)
    (folder / "header").write_bytes(HEADER)
    program = folder / "espeak-ng"
    program.write_text(
        f"""#!/bin/sh
cd '{folder}'
case "$1" in
  --voices) cat table ;;
  --voices=variant) cat variants ;;
  *) echo "$@" >>arguments; cat >text; {speaks} ;;
esac
"""
    )
    program.chmod(0o755)
    return str(program)


def _spoken(speaker: EspeakSpeaker, text: str, voice: str = "en-gb", speed: float = 1.0) -> bytes:
    request = SpeechRequest(text=text, voice=voice, format="wav", speed=speed)
    return b"".join(speaker.samples(text, request, RecordedCaller()))


def test_text_is_passed_by_stdin_and_never_as_an_argument(tmp_path: Path) -> None:
    speaker = EspeakSpeaker(_program(tmp_path, "cat header; printf abcde"))
    assert speaker.sample_rate("en-gb") == 22050
    # Half a sample at the end is left out.
    assert _spoken(speaker, "--version; $(reboot) 'x'", voice="en-gb+f3", speed=2.0) == b"abcd"
    assert (tmp_path / "text").read_text() == "--version; $(reboot) 'x'"
    last = (tmp_path / "arguments").read_text().splitlines()[-1]
    assert last == "--stdin --stdout -b 1 -v gmw/en+f3 -s 350"


def test_missing_program_is_a_missing_library(tmp_path: Path) -> None:
    with pytest.raises(ImportError):
        EspeakSpeaker(str(tmp_path / "no-such-program"))


def test_program_that_cannot_speak_is_refused_with_its_output(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="no data of voices") as refused:
        EspeakSpeaker(_program(tmp_path, "echo no data of voices >&2; exit 3"))
    assert refused.value.kind == FAILED


def test_program_failure_mid_text_fails_the_request(tmp_path: Path) -> None:
    program = _program(tmp_path, "cat header; printf ab; grep -q die text && exit 9; true")
    speaker = EspeakSpeaker(program)
    assert _spoken(speaker, "Hello") == b"ab"
    with pytest.raises(RefusedError, match="ended with status 9"):
        _spoken(speaker, "die")
    assert _spoken(speaker, "Hello again") == b"ab"


def test_cancelled_request_ends_the_program_within_a_sentence(tmp_path: Path) -> None:
    speaker = EspeakSpeaker(_program(tmp_path, "cat header; grep -q hang text && exec tail -f text; true"))
    caller = RecordedCaller()
    pieces = speaker.samples("hang", SpeechRequest(text="hang", voice="en-gb", format="wav"), caller)
    assert next(pieces) == b"hang"
    caller.leave()
    with pytest.raises(GoneError):
        list(pieces)
