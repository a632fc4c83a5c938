"""`weft media speak`: a text as a recording."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from weft.api.common.v1 import event_pb2, receipt_pb2
from weft.api.router.v1 import inference_service_pb2
from weft.client import SpeechOptions, connect
from weft.client._media_messages import speech_request
from weft.dispatch.parameter_checks import MAX_SPEECH_CHARS, MAX_SPEED, MIN_SPEED
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.media_types import suffix_of
from weft_app.cli.options import DEFAULT_HOME, AllowRemoteOption, HomeOption, naming_fields, parameter_of
from weft_app.cli.terminal import is_out_terminal, note, say, say_bytes
from weft_extensions.media.media_commands import (
    OUTPUT_OPTION,
    SPEECH,
    STANDARD,
    DetachOption,
    FetchOption,
    ModelOption,
    TimeoutOption,
    chosen_model,
    fetched,
    free_paths,
    given_options,
    read_media,
    require_writable,
    stopped,
    submit,
    work_facts,
    written,
)

FORMATS = ("mp3", "opus", "aac", "flac", "wav", "pcm")
STEM = "speech"
_Parts = Iterator[inference_service_pb2.SpeakResponse]


def speak(
    text: Annotated[
        str | None,
        typer.Argument(metavar="[TEXT]", help="Text to speak. Default: --file, or stdin.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write; - for stdout. Default: stdout in a pipe, else speech.mp3."),
    ] = None,
    *,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="File with the text to speak; - for stdin.")] = None,
    model: ModelOption = "",
    voice: Annotated[str, typer.Option(help="Name of the voice.")] = "",
    audio_format: Annotated[
        str, typer.Option("--format", help=f"{', '.join(FORMATS)}. Default: by the file's name, else mp3.")
    ] = "",
    speed: Annotated[float | None, typer.Option(min=MIN_SPEED, max=MAX_SPEED, help="How fast.")] = None,
    instructions: Annotated[str, typer.Option(help="Instructions for the speaker.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    detach: DetachOption = False,
    fetch: FetchOption = "",
    allow_remote: AllowRemoteOption = False,
    timeout: TimeoutOption = 600.0,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Speak a text: the recording goes to a file, or to stdout in a pipe. Nothing is played; Ctrl-C cancels.

    Example: weft media speak "The build is green." -o green.wav
    """
    is_piped = output is None and not is_out_terminal()
    to_stdout = is_piped or (output is not None and str(output) == STANDARD)
    if output is not None and not to_stdout:
        require_writable([output], force=force)
    if fetch:
        parts = _spoken(fetched(fetch, "speech", home)[0])
        note(work_facts(_to_stdout(parts) if to_stdout else _to_file(parts, output, force=force)))
        return
    said = _text(text, file)
    given = {
        "voice": voice,
        "format": _format(audio_format, None if to_stdout else output),
        "speed": speed,
        "instructions": instructions,
        "allow_remote": allow_remote,
    }
    options: SpeechOptions = given_options(given)
    name = chosen_model(model, SPEECH, home)
    with naming_fields(parameter_of):
        if detach:
            submit(speech_request(name, said, options), "speech", "speak", home)
            return
        with connect(home=home) as mesh:
            parts = mesh.speak(name, said, timeout=timeout, **options)
            try:
                receipt = _to_stdout(parts) if to_stdout else _to_file(parts, output, force=force)
            except KeyboardInterrupt:
                stopped("the recording is incomplete" if to_stdout else "no file was written")
    note(work_facts(receipt))


def _spoken(events: Iterable[event_pb2.InferenceEvent]) -> _Parts:
    """Yields the speech of a task in the form of live speech."""
    for event in events:
        if event.HasField("speech"):
            yield inference_service_pb2.SpeakResponse(data=event.speech.data, media_type=event.speech.media_type)
        elif event.HasField("finished"):
            yield inference_service_pb2.SpeakResponse(receipt=event.finished.receipt)


def _text(text: str | None, file: Path | None) -> str:
    """Returns the text to speak. Raises INVALID_ARGUMENT if there is none or more than one."""
    if text is not None and file is not None:
        raise invalid_field("--file", "cannot be combined with TEXT")
    if text is None and file is None and sys.stdin.isatty():
        raise invalid_field("TEXT", "give a text or --file, or pipe it in")
    if text is None:
        source = Path(STANDARD) if file is None else file
        text = read_media(source, "--file").decode("utf-8", "replace").strip()
    if not text.strip():
        raise invalid_field("TEXT", "is empty")
    if len(text) > MAX_SPEECH_CHARS:
        raise invalid_field(
            "TEXT", f"has {len(text)} characters; at most {MAX_SPEECH_CHARS} are allowed; send it in parts"
        )
    return text


def _format(asked: str, output: Path | None) -> str:
    """Returns the format to request; empty: the model's default. Raises INVALID_ARGUMENT for an unknown one."""
    if asked:
        if asked not in FORMATS:
            raise invalid_field("--format", f"must be one of {', '.join(FORMATS)}")
        return asked
    suffix = "" if output is None else output.suffix.lower().removeprefix(".")
    suffix = "opus" if suffix == "ogg" else suffix
    if output is not None and suffix not in FORMATS:
        raise invalid_field(OUTPUT_OPTION, f"{output} must end with .{', .'.join(FORMATS)}, or give --format")
    return suffix


def _to_stdout(parts: _Parts) -> receipt_pb2.Receipt:
    receipt = receipt_pb2.Receipt()
    for part in parts:
        say_bytes([part.data])
        receipt.MergeFrom(part.receipt)
    return receipt


def _to_file(parts: _Parts, output: Path | None, *, force: bool) -> receipt_pb2.Receipt:
    first = next(parts, None)
    if first is None:
        raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "the model sent an empty recording")
    path = output or free_paths(STEM, suffix_of(first.media_type), 1)[0]
    receipt = receipt_pb2.Receipt()
    receipt.MergeFrom(first.receipt)
    with written(path, force=force) as file:
        file.write(first.data)
        for part in parts:
            file.write(part.data)
            receipt.MergeFrom(part.receipt)
    say(f"{path}\n")
    return receipt
