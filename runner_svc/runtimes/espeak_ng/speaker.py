"""espeak-ng as a Speaker: runs the program for every piece of text."""

import os
import re
import select
import struct
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import IO

from runner_svc.engine_host.http_server import FAILED, LOOK_SECONDS, Caller, RefusedError
from runner_svc.engine_host.sound_encoder import SAMPLE_BYTES
from runner_svc.engine_host.speech import SpeechRequest, Voice

USUAL_WORDS_PER_MINUTE = 175
"""The program's default speed, which corresponds to 1 in a request."""
MIN_WORDS_PER_MINUTE = 80
"""Minimum speed of the program."""
MAX_WORDS_PER_MINUTE = 900
LIST_SECONDS = 30.0
MAX_LIST_BYTES = 1024 * 1024
MAX_ROWS = 1000
READ_BYTES = 64 * 1024
_HEADER = struct.Struct("<4sI4s4sIHHIIHH4sI")
_ROW = re.compile(r"\s*\d+\s+(?P<language>\S+)\s+\S+\s+(?P<name>\S+)\s+(?P<file>\S+)")
_OF_MBROLA = "mb/"
_VARIANTS = "!v/"
VARIANT_MARK = "+"


class EspeakSpeaker:
    """See Speaker."""

    def __init__(self, program: str) -> None:
        """Raises ImportError if the program does not exist, RefusedError if it does not work."""
        self._program = program
        rows = listed_voices(self._list("--voices"))
        self.voices: Sequence[Voice] = [row.voice for row in rows]
        """See Speaker.voices."""
        self._files = {row.voice.name: row.file for row in rows}
        self.variants: Sequence[str] = listed_variants(self._list("--voices=variant"))
        """See Speaker.variants."""
        if not self.voices:
            raise RefusedError(f"{program} --voices lists no voice", FAILED)
        self._rate = self._found_rate(self.voices[0].name)

    def sample_rate(self, voice: str) -> int:
        """See Speaker.sample_rate."""
        del voice
        return self._rate

    def samples(self, text: str, request: SpeechRequest, caller: Caller) -> Iterator[bytes]:
        """See Speaker.samples. The program is stopped if the caller disconnects."""
        with subprocess.Popen(  # noqa: S603 - arguments without a shell; the voice is from the program's list
            self._command(request.voice, request.speed),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:
            try:
                yield from self._spoken(process, text.encode(), caller)
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            raise RefusedError(f"{self._program} ended with status {process.returncode}", FAILED)

    def _spoken(self, process: subprocess.Popen[bytes], text: bytes, caller: Caller) -> Iterator[bytes]:
        """Yields the samples that the program writes; if there are none, its exit status tells why."""
        assert process.stdin is not None, "it was started with pipes"
        assert process.stdout is not None, "it was started with pipes"
        with suppress(BrokenPipeError):
            process.stdin.write(text)
            process.stdin.close()
        output, head, rest = _output(process.stdout, caller), b"", b""
        while len(head) < _HEADER.size and (data := next(output, b"")):
            head += data
        rate = rate_of(head[: _HEADER.size])
        if rate not in (None, self._rate):
            raise RefusedError(f"{self._program} has changed its rate to {rate} samples per second", FAILED)
        for data in chain([head[_HEADER.size :]], output):
            whole, rest = _split(rest + data)
            if whole:
                yield whole

    def _command(self, voice: str, speed: float) -> Sequence[str]:
        return (
            *(self._program, "--stdin", "--stdout", "-b", "1", "-v", self._program_voice(voice)),
            *("-s", str(words_per_minute(USUAL_WORDS_PER_MINUTE, speed))),
        )

    def _program_voice(self, voice: str) -> str:
        """Returns the program's name of a voice: with a variant its file, since `en-gb+f3` would have no effect."""
        name, mark, variant = voice.partition(VARIANT_MARK)
        return f"{self._files[name]}{mark}{variant}" if mark else voice

    def _list(self, flag: str) -> str:
        """Returns the program's output for a flag. Raises ImportError, RefusedError."""
        try:
            found = subprocess.run(  # noqa: S603 - arguments without a shell
                (self._program, flag),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=LIST_SECONDS,
                check=True,
            )
        except OSError as error:
            raise ImportError(f"{self._program}: {error}") from error
        except subprocess.SubprocessError as error:
            raise RefusedError(f"{self._program} {flag} failed: {error}", FAILED) from error
        return found.stdout[:MAX_LIST_BYTES].decode(errors="replace")

    def _found_rate(self, voice: str) -> int:
        """Determines the sample rate by speaking one letter. Raises RefusedError if that fails."""
        try:
            found = subprocess.run(  # noqa: S603 - arguments without a shell
                self._command(voice, 1.0),
                input=b"a",
                capture_output=True,
                timeout=LIST_SECONDS,
                check=False,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise RefusedError(f"{self._program} does not speak: {error}", FAILED) from error
        rate = rate_of(found.stdout[: _HEADER.size])
        if rate is None:
            said = " ".join(found.stderr.decode(errors="replace").split())[:300]
            raise RefusedError(f"{self._program} does not speak (status {found.returncode}): {said}", FAILED)
        return rate


def _output(stream: IO[bytes], caller: Caller) -> Iterator[bytes]:
    """Yields a program's output as it arrives. Raises GoneError once the caller has disconnected."""
    while True:
        while not select.select([stream], [], [], LOOK_SECONDS)[0]:
            caller.raise_if_gone()
        data = os.read(stream.fileno(), READ_BYTES)
        if not data:
            return
        yield data


def words_per_minute(usual: int, speed: float) -> int:
    """Converts the speed of a request to that of the program."""
    return min(max(round(usual * speed), MIN_WORDS_PER_MINUTE), MAX_WORDS_PER_MINUTE)


def rate_of(header: bytes) -> int | None:
    """Returns the sample rate in the header of a 16-bit mono WAV; None: another file."""
    if len(header) < _HEADER.size:
        return None
    riff, _, wave, form, _, sort, channels, rate, _, _, bits, _, _ = _HEADER.unpack(header)
    return rate if (riff, wave, form, sort, channels, bits) == (b"RIFF", b"WAVE", b"fmt ", 1, 1, 16) else None


@dataclass(frozen=True, slots=True)
class ListedVoice:
    """A row of the program's voice table."""

    voice: Voice
    file: str


def listed_voices(table: str) -> Sequence[ListedVoice]:
    """Parses the program's voice table; voices of mbrola, a separate program, are skipped."""
    found: dict[str, ListedVoice] = {}
    for row in map(_ROW.match, table.splitlines()[:MAX_ROWS]):
        # A name must not be parsed as a flag.
        if row is None or row["file"].startswith(_OF_MBROLA) or row["language"].startswith("-"):
            continue
        voice = Voice(name=row["language"], language=row["language"], aliases=[row["name"]])
        found.setdefault(voice.name, ListedVoice(voice, row["file"]))
    return list(found.values())


def listed_variants(table: str) -> Sequence[str]:
    """Parses the program's variant table; variants combine with every voice, as in `en-gb+f3`."""
    rows = map(_ROW.match, table.splitlines()[:MAX_ROWS])
    return [
        row["file"].removeprefix(_VARIANTS) for row in rows if row is not None and row["file"].startswith(_VARIANTS)
    ]


def _split(data: bytes) -> tuple[bytes, bytes]:
    """Returns the complete samples, and the rest."""
    end = len(data) - len(data) % SAMPLE_BYTES
    return data[:end], data[end:]
