"""The messages between a runner and the host program of an engine.

Each message is a four-byte length, most significant byte first, followed by JSON. Both ends have the same version: they
come from one installation. The runner assigns ids, counting up from 1. An engine with several slots mixes the answers
to several requests.
"""

import struct
from collections.abc import Callable
from typing import Any

import msgspec

TOKEN_VARIABLE = "WEFT_ENGINE_TOKEN"  # noqa: S105 - the name of a variable
"""Environment variable with the token by which the program authenticates."""
MAX_MESSAGE_BYTES = 32 * 1024 * 1024
LENGTH_BYTES = 4
LOAD_ID = 0
"""Id of a failed load."""
LIBRARY_MISSING = "LIBRARY_MISSING"
"""Reason of a load that failed because the library cannot be imported."""


class Transcribe(msgspec.Struct, tag="transcribe", kw_only=True):
    """Transcribe the recording in a file."""

    id: int
    path: str
    """The file, which the runner removes once the request has ended."""
    language: str = ""
    """ISO 639-1; empty: to be detected."""
    prompt: str = ""
    """Words that guide the style or continue an earlier part."""
    temperature: float | None = None
    """None: the engine's own."""
    translate: bool = False
    """Whether the words are to be English."""
    with_words: bool = False
    """Whether the times of words are wanted."""
    voice_detection: bool | None = None
    """Whether parts without a voice are left out; None: as the model is configured."""


class MakeImages(msgspec.Struct, tag="make_images", kw_only=True):
    """Make images, one after the other; the image of a number has the seed `seed` + number."""

    id: int
    prompt: str
    seed: int
    negative_prompt: str = ""
    width: int | None = None
    """In pixels; None: the model's own, or that of the source image."""
    height: int | None = None
    count: int = 1
    steps: int | None = None
    """None: as the model is configured; so with the next two."""
    guidance: float | None = None
    strength: float | None = None
    """How much of the source image is changed, 0 to 1."""
    image_paths: list[str] = []
    """The source images, files that the runner removes once the request has ended; none: from words alone."""
    mask_path: str = ""
    """The mask of the first of them; empty: it may be changed everywhere."""
    partial_images: int = 0
    """How many previews of each image are sent."""
    output_format: str = "png"
    """`png`, `jpeg` or `webp`."""
    options: dict[str, Any] = {}
    """Further parameters by the library's names."""


class Speak(msgspec.Struct, tag="speak", kw_only=True):
    """Speak a text."""

    id: int
    text: str
    voice: str
    format: str
    """`mp3`, `opus`, `aac`, `flac`, `wav` or `pcm`; empty: mp3, or wav where there is no encoder of it."""
    speed: float = 1.0
    options: dict[str, Any] = {}
    """Further parameters by the engine's names."""


class Sleep(msgspec.Struct, tag="sleep"):
    """Free the memory of the model and keep the process; answered with Done. Sent without running requests."""

    id: int


class Wake(msgspec.Struct, tag="wake"):
    """Load the model again after Sleep; answered with Done."""

    id: int


class Cancel(msgspec.Struct, tag="cancel"):
    """Stop the work on a cancelled request."""

    id: int


class Ping(msgspec.Struct, tag="ping"):
    """Request for a Pong, which is sent at once, also while the engine works."""

    id: int


class Hello(msgspec.Struct, tag="hello"):
    """The first message of the program."""

    token: str
    pid: int


class LoadProgress(msgspec.Struct, tag="load_progress"):
    """The loaded share of the model, 0 to 1."""

    share: float


class Voice(msgspec.Struct, kw_only=True):
    """A voice of an engine that speaks."""

    name: str
    language: str = ""
    """Its language, such as `en-GB`; empty: unknown."""
    aliases: list[str] = []
    """Further names of it."""
    speakers: list[str] = []
    """Its speakers; empty: it has one."""
    fault: str = ""
    """Why it cannot be used; empty: it can."""


class Ready(msgspec.Struct, tag="ready"):
    """The model is loaded."""

    slots: int = 1
    """Number of requests that the engine works on at once."""
    voices: list[Voice] = []
    """Its voices, of an engine that speaks."""
    voice_variants: list[str] = []
    """Variants that go with every voice."""


class Done(msgspec.Struct, tag="done", kw_only=True):
    """The end of a request, with its usage."""

    id: int
    completion_tokens: int = 0
    seconds: float = 0.0
    """Time that the engine worked on it."""
    image_steps: int = 0
    """Steps of denoising, over all images."""
    image_pixels: int = 0
    """Pixels of all images."""
    audio_seconds: float = 0.0
    """Length of the recording that was heard or spoken."""


class Worked(msgspec.Struct, tag="worked", kw_only=True):
    """The progress of the work on images, a recording or speech: steps, seconds or characters."""

    id: int
    done: float
    total: float = 0.0
    """0: unknown."""
    stage: str = ""
    """What is happening, in words; empty: the work itself."""


class Picture(msgspec.Struct, tag="picture", kw_only=True):
    """An image, or a preview of one."""

    id: int
    index: int
    """Which image of the request it is, counted from 0."""
    data: bytes
    media_type: str
    seed: int | None = None
    partial_index: int | None = None
    """Which preview of the image it is, counted from 0; None: the image is complete."""


class Recording(msgspec.Struct, tag="recording", kw_only=True):
    """What is found out about a recording before its first words."""

    id: int
    language: str = ""
    """ISO 639-1; empty: unknown."""
    duration_seconds: float = 0.0
    """0: unknown."""


class Word(msgspec.Struct, kw_only=True):
    """One word of a recording."""

    start: float
    end: float
    text: str
    """Without the space before it."""
    probability: float | None = None


class Segment(msgspec.Struct, tag="segment", kw_only=True):
    """A part of a transcription, in the order of the recording. Times are in seconds."""

    id: int
    start: float
    end: float
    text: str
    """With the space before it, so that the texts of all segments together are the transcription."""
    words: list[Word] = []
    mean_logprob: float | None = None
    no_speech_probability: float | None = None
    compression_ratio: float | None = None
    temperature: float | None = None


class Sound(msgspec.Struct, tag="sound", kw_only=True):
    """A piece of generated speech."""

    id: int
    data: bytes
    """At least one byte."""
    media_type: str


class Failed(msgspec.Struct, tag="failed"):
    """The failure of a request or the load. `reason` is the name of a `Reason`."""

    id: int
    reason: str
    message: str


class Pong(msgspec.Struct, tag="pong"):
    """The answer to a Ping."""

    id: int


Work = Sleep | Wake | Transcribe | MakeImages | Speak
"""Requests whose answers end with Done or Failed."""
ToEngine = Work | Cancel | Ping
Answer = Worked | Picture | Recording | Segment | Sound | Done | Failed
"""Answers to a request."""
ToRunner = Hello | LoadProgress | Ready | Pong | Answer


class TooLongError(Exception):
    """A message exceeds MAX_MESSAGE_BYTES."""


def encode(message: ToEngine | ToRunner) -> bytes:
    """Encodes a message. Raises TooLongError."""
    body = msgspec.json.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise TooLongError
    return struct.pack(">I", len(body)) + body


def body_length(head: bytes) -> int:
    """Returns the length of the message after these LENGTH_BYTES. Raises TooLongError."""
    length: int = struct.unpack(">I", head)[0]
    if length > MAX_MESSAGE_BYTES:
        raise TooLongError
    return length


def read_message(read_exactly: Callable[[int], bytes], decoder: msgspec.json.Decoder[ToEngine]) -> ToEngine:
    """Reads the next message of a blocking stream. Raises EOFError at its end, TooLongError, msgspec.DecodeError."""
    return decoder.decode(read_exactly(body_length(read_exactly(LENGTH_BYTES))))
