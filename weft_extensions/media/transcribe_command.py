"""`weft media transcribe`: the words of a recording, as text, captions or a document."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from weft.api.common.v1 import audio_pb2, event_pb2, receipt_pb2
from weft.client import TranscriptionOptions, connect
from weft.client._media_messages import transcription_request
from weft.dispatch.frames import collected_transcription
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.media_types import audio_type_of_name
from weft_app.cli.options import DEFAULT_HOME, AllowRemoteOption, HomeOption, naming_fields, parameter_of
from weft_app.cli.output import json_text
from weft_app.cli.terminal import is_err_terminal, is_out_terminal, note, say_answer
from weft_extensions.media.media_commands import (
    MAX_TIMEOUT_SECONDS,
    TRANSCRIPTIONS,
    DetachOption,
    FetchOption,
    ModelOption,
    TimeoutOption,
    chosen_model,
    fetched,
    given_options,
    read_media,
    require_writable,
    shown_work,
    stopped,
    submit,
    work_facts,
    written,
)

Write = Callable[[str], None]
_ADVICE = "; to make it smaller: ffmpeg -i FILE -ac 1 -ar 16000 talk.opus"
_NO_TIMES = "the model reports no times; omit --srt, --vtt and --words"


class TranscriptFormat(StrEnum):
    """Output format of a transcription."""

    TEXT = "text"
    SRT = "srt"
    VTT = "vtt"
    JSON = "json"
    WORDS = "words"
    """JSON with the times of single words."""


def transcribe(
    recording: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="Recording; - for standard input.", show_default=False)
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write. Default: stdout.")] = None,
    model: ModelOption = "",
    *,
    srt: Annotated[bool, typer.Option("--srt", help="Captions as SubRip.")] = False,
    vtt: Annotated[bool, typer.Option("--vtt", help="Captions as WebVTT.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A document with segments and their times.")] = False,
    words: Annotated[bool, typer.Option("--words", help="As --json, including the times of single words.")] = False,
    language: Annotated[str, typer.Option(help="Language of the recording, such as de. Default: detected.")] = "",
    translate: Annotated[bool, typer.Option("--translate", help="Translate to English.")] = False,
    prompt: Annotated[str, typer.Option(help="Text that guides spelling and style, such as names.")] = "",
    temperature: Annotated[float | None, typer.Option(min=0, max=1, help="Sampling temperature; 0: greedy.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    detach: DetachOption = False,
    fetch: FetchOption = "",
    allow_remote: AllowRemoteOption = False,
    timeout: TimeoutOption = MAX_TIMEOUT_SECONDS,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Transcribe a recording. Text and captions are streamed, progress goes to stderr; Ctrl-C cancels.

    Example: weft media transcribe talk.mp3 --srt -o talk.srt
    """
    chosen = _chosen_format({"srt": srt, "vtt": vtt, "json": as_json, "words": words})
    if output is not None:
        require_writable([output], force=force)
    if fetch:
        events, spec = fetched(fetch, "transcription", home)
        if chosen is TranscriptFormat.WORDS and not spec.transcription.with_words:
            raise invalid_field("--words", f"task {fetch} was submitted without it; --json has the times of segments")
        _write(events, chosen, output, force=force, is_translated=spec.transcription.translate)
        return
    if recording is None:
        raise invalid_field("FILE", "name a recording, or use --fetch TASK")
    given = {
        "media_type": audio_type_of_name(recording.name),
        "language": language,
        "prompt": prompt,
        "temperature": temperature,
        "translate": translate,
        # The result of a task may be fetched in any format.
        "with_segments": detach or chosen is not TranscriptFormat.TEXT,
        "with_words": chosen is TranscriptFormat.WORDS,
        "allow_remote": allow_remote,
    }
    options: TranscriptionOptions = given_options(given)
    data = read_media(recording, "FILE", _ADVICE)
    name = chosen_model(model, TRANSCRIPTIONS, home)
    with naming_fields(parameter_of):
        if detach:
            submit(transcription_request(name, data, options), "transcription", "transcribe", home)
            return
        with connect(home=home) as mesh:
            streamed = mesh.stream_transcription(name, data, timeout=timeout, **options)
            _write(streamed, chosen, output, force=force, is_translated=translate)


def _write(
    events: Iterable[event_pb2.InferenceEvent],
    chosen: TranscriptFormat,
    output: Path | None,
    *,
    force: bool,
    is_translated: bool,
) -> None:
    """Streams a transcription to a file or stdout."""
    with nullcontext() if output is None else written(output, force=force) as file:

        def write(text: str) -> None:
            if file is None:
                say_answer(text)
            else:
                file.write(text.encode())

        transcript = Transcript(chosen, write, is_translated=is_translated)
        # On a terminal the streamed text already shows the progress.
        is_bar_shown = output is not None or chosen in (TranscriptFormat.JSON, TranscriptFormat.WORDS)
        is_bar_shown = is_bar_shown or not (is_out_terminal() and is_err_terminal())
        try:
            with shown_work(is_shown=is_bar_shown) as show:
                for event in events:
                    show(event)
                    transcript.add(event)
            transcript.finish()
        except KeyboardInterrupt:
            stopped("the transcription is incomplete")
    note(work_facts(transcript.receipt))


def _chosen_format(flags: dict[str, bool]) -> TranscriptFormat:
    given = [name for name, is_set in flags.items() if is_set]
    if given == ["json", "words"]:
        return TranscriptFormat.WORDS
    if len(given) > 1:
        raise invalid_field(f"--{given[1]}", f"cannot be combined with --{given[0]}")
    return TranscriptFormat(given[0]) if given else TranscriptFormat.TEXT


class Transcript:
    """Writes the pieces of a transcription in one format as they arrive."""

    def __init__(self, chosen: TranscriptFormat, write: Write, *, is_translated: bool = False) -> None:
        self.receipt = receipt_pb2.Receipt()
        """The receipt, once the transcription is complete."""
        self._chosen = chosen
        self._write = write
        self._is_translated = is_translated
        self._events: list[event_pb2.InferenceEvent] = []
        self._captions = 0
        self._has_text = False

    def add(self, event: event_pb2.InferenceEvent) -> None:
        """Processes the next event; ignores unrelated ones."""
        if event.HasField("finished"):
            self.receipt.CopyFrom(event.finished.receipt)
        if not event.HasField("transcript"):
            return
        match self._chosen:
            case TranscriptFormat.TEXT:
                self._add_text(event.transcript.text)
            case TranscriptFormat.SRT | TranscriptFormat.VTT:
                self._has_text = self._has_text or bool(event.transcript.text.strip())
                if event.transcript.HasField("segment"):
                    self._add_caption(event.transcript.segment)
            case _:
                self._events.append(event)

    def finish(self) -> None:
        """Writes the end. Raises UNSUPPORTED_OPERATION if the format needs times and the model has none."""
        match self._chosen:
            case TranscriptFormat.TEXT:
                self._write("\n")
            case TranscriptFormat.SRT | TranscriptFormat.VTT:
                if self._has_text and not self._captions:
                    raise WeftError(Reason.UNSUPPORTED_OPERATION, _NO_TIMES)
                if self._chosen is TranscriptFormat.VTT and not self._captions:
                    self._write("WEBVTT\n")
            case _:
                self._write(json_text(self._document()))

    def _add_text(self, text: str) -> None:
        # The first piece may begin with a space.
        self._write(text if self._has_text else text.lstrip())
        self._has_text = self._has_text or bool(text.strip())

    def _add_caption(self, segment: audio_pb2.TranscriptionSegment) -> None:
        self._captions += 1
        is_vtt = self._chosen is TranscriptFormat.VTT
        if self._captions == 1 and is_vtt:
            self._write("WEBVTT\n\n")
        elif self._captions > 1:
            self._write("\n")
        self._write(caption(segment, self._captions, is_vtt=is_vtt))

    def _document(self) -> dict[str, object]:
        whole = collected_transcription([self._events])
        words = [word for segment in whole.segments for word in segment.words]
        if self._chosen is TranscriptFormat.WORDS and whole.text and not words:
            raise WeftError(Reason.UNSUPPORTED_OPERATION, _NO_TIMES)
        document: dict[str, object] = {
            "task": "translate" if self._is_translated else "transcribe",
            "language": whole.language,
            "duration": whole.duration_seconds,
            "text": whole.text,
            "segments": [
                {"id": index, "start": each.start_seconds, "end": each.end_seconds, "text": each.text}
                for index, each in enumerate(whole.segments)
            ],
        }
        if self._chosen is TranscriptFormat.WORDS:
            document["words"] = [
                {"word": word.text, "start": word.start_seconds, "end": word.end_seconds} for word in words
            ]
        return document


def caption(segment: audio_pb2.TranscriptionSegment, number: int, *, is_vtt: bool) -> str:
    """Returns a segment as one SubRip or WebVTT caption, with the line end after it."""
    mark = "." if is_vtt else ","
    times = f"{_clock(segment.start_seconds, mark)} --> {_clock(segment.end_seconds, mark)}"
    # An empty line would end the caption, and an arrow would be parsed as times.
    text = " ".join(segment.text.split()).replace("-->", "->")
    return f"{times}\n{text}\n" if is_vtt else f"{number}\n{times}\n{text}\n"


def _clock(seconds: float, mark: str) -> str:
    milliseconds = round(max(0.0, seconds) * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{mark}{rest % 1000:03}"
