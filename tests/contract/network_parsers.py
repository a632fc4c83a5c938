"""Every parser of bytes that come over a network or in a model file, by name, and its saved inputs.

A parser returns, or raises one of its refusals: a WeftError that says what is wrong with the input, or the error that
its callers handle. `tests/corpus/parsers/NAME` holds its saved inputs: examples, and what was found by fuzzing.

A long run, which saves what it finds there; with atheris, if that is installed, it follows the code that inputs reach:

    make fuzz ARGS="gguf --minutes 60"
"""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import http_bodies
import msgspec
from google.protobuf.message import DecodeError

from gateway.gateway_config import MediaConfig, RequestLimits
from gateway.intake.body import decoded
from gateway.intake.json_guard import parse_json
from gateway.intake.multipart import MultipartStream, boundary_of
from gateway.media.addresses import parse_url
from gateway.media.content import checked_audio, checked_image
from runner_svc.anthropic_upstream.anthropic_stream import MessagesReader
from runner_svc.model_files.gguf import read_gguf_header
from runner_svc.model_files.safetensors import read_safetensors_model
from runner_svc.model_files.tokenizer_folder import read_tokenizer_folder
from runner_svc.openai_upstream import media, media_stream
from runner_svc.openai_upstream.errors import refusal, stated_answer
from runner_svc.openai_upstream.openai_stream import StreamReader
from runner_svc.openai_upstream.sse import SseDecoder
from runner_svc.runtimes.kv_events import UntrackedCacheError, events_of
from runner_svc.templates.sandbox import TemplateSandbox
from weft.api.common.v1 import link_pb2
from weft.dispatch.media_work import recording_seconds
from weft.documents.yaml_documents import read_documents
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.tracing import Sampling
from weft.kernel.text.content_coding import BodyDecoder
from weft.kernel.text.decoding import DECODE_FAULTS
from weft.link.frames import Side, error_of, metadata_of, timeout_of
from weft.link.multiplexer import LinkLimits, Multiplexer
from weft_app.compose.join_address import parse_fingerprint, parse_join_address
from weft_app.compose.mdns_announcement import parse_announcement
from weft_extensions.publishers.messages import read_piece, read_registration

CORPUS = Path(__file__).parents[1] / "corpus" / "parsers"
MAX_DECODED_BYTES = 1024 * 1024
MAX_JSON_DEPTH = 64
Parse = Callable[[bytes], object]

REFUSALS = frozenset(
    {
        Reason.INVALID_ARGUMENT,
        Reason.MALFORMED_REQUEST,
        Reason.REQUEST_TOO_LARGE,
        Reason.TOO_MANY_RESOURCES,
    }
)
"""What a caller did wrong."""
ENGINE_REFUSALS = REFUSALS | {
    Reason.BACKEND_PROTOCOL_ERROR,
    Reason.BACKEND_ERROR,
    Reason.BACKEND_REJECTED,
    Reason.BACKEND_NOT_READY,
    Reason.CONTEXT_LENGTH_EXCEEDED,
    Reason.OUT_OF_MEMORY,
    Reason.TOOL_CALL_INVALID,
}
"""What an engine did wrong, or says of a request."""


@dataclass(frozen=True, slots=True)
class Parser:
    """A parser and its refusals: the reasons of a WeftError, and other errors."""

    parse: Parse
    reasons: frozenset[Reason] = REFUSALS
    errors: tuple[type[Exception], ...] = field(default=())

    def judge(self, content: bytes) -> bool:
        """Returns whether the content was read; False: it was refused. Raises anything that is no refusal."""
        try:
            self.parse(content)
        except WeftError as error:
            if error.reason not in self.reasons:
                raise
            return False
        except self.errors:
            return False
        return True


def _with_file(name: str, read: Callable[[Path], object]) -> Parse:
    """A parser of files."""

    def parse(content: bytes) -> None:
        path = _folder() / name
        path.write_bytes(content)
        read(path)

    return parse


@cache
def _folder() -> Path:
    """In memory where there is such a folder."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="weft-parsers-", dir=memory if memory.is_dir() else None))


def _safetensors_folder(path: Path) -> None:
    read_safetensors_model(path)


def _tokenizer_folder(path: Path) -> None:
    read_tokenizer_folder(path.parent)


def _pieces(content: bytes) -> Iterable[bytes]:
    """The content in chunks of uneven size, as a network delivers it."""
    at, size = 0, 1
    while at < len(content):
        yield content[at : at + size]
        at, size = at + size, size * 3 % 1021 + 1


def _read_stream(make: Callable[[], StreamReader]) -> Parse:
    def parse(content: bytes) -> None:
        decoder, reader = SseDecoder(), make()
        for piece in _pieces(content):
            reader.read(decoder.feed(piece))
        reader.finish()

    return parse


def _read_media_events(make: Callable[[], Any]) -> Parse:
    def parse(content: bytes) -> None:
        events = make()
        for payload in SseDecoder().feed(content):
            events.read(payload)
        events.require_end()

    return parse


def _read_link(content: bytes) -> None:
    """Frames, each after its length in two bytes, to a side that answers and reads."""
    mux, at = Multiplexer(Side.ROUTER, LinkLimits(max_peer_calls=8, max_own_calls=8)), 0
    own = mux.begin("/weft.Any/Call")
    mux.send(own, b"x" * 3000)
    while at + 2 <= len(content):
        size = int.from_bytes(content[at : at + 2], "big")
        frame = link_pb2.LinkFrame.FromString(content[at + 2 : at + 2 + size])
        at += 2 + size
        event = mux.receive(frame)
        if frame.HasField("start"):
            timeout_of(frame.start)
            metadata_of(frame.start.metadata)
        if event is not None:
            while mux.read(event.call) is not None:
                pass
            if event.call.status is not None:
                error_of(event.call.status)
        mux.take_frames(1 << 16)


def _read_multipart(content: bytes) -> None:
    """The Content-Type is the first line."""
    kind, _, body = content.partition(b"\n")

    async def arriving() -> AsyncIterator[bytes]:
        for piece in _pieces(body):
            yield piece

    async def read() -> None:
        for part in await MultipartStream(arriving(), boundary_of(kind), RequestLimits()).parts():
            with suppress(WeftError):
                part.text  # noqa: B018 - it decodes

    asyncio.run(read())


def _decode_body(coding: str) -> Parse:
    def parse(content: bytes) -> None:
        assert len(decoded(content, BodyDecoder(coding), MAX_DECODED_BYTES)) <= MAX_DECODED_BYTES + 1

    return parse


def _read_images(content: bytes) -> None:
    with suppress(WeftError):
        checked_image(content, "image", MediaConfig())


def _read_sound(content: bytes) -> None:
    with suppress(WeftError):
        checked_audio(content, "audio", MediaConfig())
    assert recording_seconds(content) >= 0
    media.png_pixels(content)


def _render(content: bytes) -> None:
    """A template, and its conversation in JSON after a zero byte."""
    template, _, variables = content.partition(b"\0")
    try:
        given = msgspec.json.decode(variables, type=dict[str, Any]) if variables else {}
    except (msgspec.DecodeError, ValueError):
        given = {}
    loop, sandbox = _sandbox()
    loop.run_until_complete(sandbox.render(template.decode("utf-8", "replace"), given))


@cache
def _sandbox() -> tuple[asyncio.AbstractEventLoop, TemplateSandbox]:
    return asyncio.new_event_loop(), TemplateSandbox(wall_seconds=2.0)


def clean_up() -> None:
    """Ends the process that renders templates and the gateway, and removes the folder of files."""
    if _sandbox.cache_info().currsize:
        loop, sandbox = _sandbox()
        loop.run_until_complete(sandbox.stop())
        loop.close()
        _sandbox.cache_clear()
    http_bodies.close()
    if _folder.cache_info().currsize:
        shutil.rmtree(_folder())
        _folder.cache_clear()


def _read_join(content: bytes) -> None:
    """URL, fingerprint, and an announcement: its port, name, version and addresses, each on a line."""
    url, fingerprint, port, name, version, *addresses = [*content.decode("utf-8", "replace").split("\n"), *[""] * 5]
    properties = {b"fp": fingerprint.encode(), b"version": version.encode()}
    announced = parse_announcement(
        name, int(port) if port.isascii() and port.isdigit() else None, properties, addresses
    )
    if announced is not None:
        assert announced.shown_addresses
    parse_join_address(url)
    parse_fingerprint(fingerprint, "--fingerprint")


def _read_headers(content: bytes) -> None:
    """What is in single headers and URLs."""
    text = content.decode("latin-1")
    Sampling().begin(text)
    parse_url(text)


def _read_error(content: bytes) -> None:
    """An engine's answer to a request that it refuses."""
    stated_answer(content)
    raise refusal(400, content, {"retry-after": content[:20].decode("latin-1")})


PARSERS: Mapping[str, Parser] = MappingProxyType(
    {
        "http_body": Parser(http_bodies.send_body),
        "json": Parser(lambda content: parse_json(content, max_depth=MAX_JSON_DEPTH)),
        "multipart": Parser(_read_multipart),
        "gzip": Parser(_decode_body("gzip")),
        "zstd": Parser(_decode_body("zstd")),
        "yaml": Parser(lambda content: read_documents(content.decode("utf-8", "replace"), "file")),
        "chat_stream": Parser(_read_stream(lambda: StreamReader(1, 1)), ENGINE_REFUSALS),
        "chat_whole": Parser(_read_stream(lambda: StreamReader(2, 2, whole=True)), ENGINE_REFUSALS),
        "messages_stream": Parser(_read_stream(lambda: MessagesReader(whole=False)), ENGINE_REFUSALS),
        "image_stream": Parser(_read_media_events(media_stream.ImageEvents), ENGINE_REFUSALS),
        "transcript_stream": Parser(_read_media_events(media_stream.TranscriptEvents), ENGINE_REFUSALS),
        "speech_stream": Parser(_read_media_events(media_stream.SpeechEvents), ENGINE_REFUSALS),
        "image_answer": Parser(media._whole_images, ENGINE_REFUSALS),
        "transcript_answer": Parser(media._whole_transcription, ENGINE_REFUSALS),
        "engine_error": Parser(_read_error, ENGINE_REFUSALS),
        "kv_events": Parser(events_of, frozenset(), (*DECODE_FAULTS, UntrackedCacheError)),
        "publisher_registration": Parser(lambda content: read_registration(content, 8)),
        "publisher_piece": Parser(read_piece),
        "link": Parser(_read_link, REFUSALS, (DecodeError,)),
        "gguf": Parser(_with_file("model.gguf", read_gguf_header)),
        "safetensors": Parser(_with_file("model.safetensors", _safetensors_folder)),
        "tokenizer_config": Parser(_with_file("tokenizer_config.json", _tokenizer_folder)),
        "template": Parser(_render, frozenset({Reason.TEMPLATE_FAILED, Reason.INVALID_ARGUMENT})),
        "join": Parser(_read_join),
        "header": Parser(_read_headers),
        "image": Parser(_read_images),
        "sound": Parser(_read_sound),
    }
)


def saved_inputs(name: str) -> list[Path]:
    """The files of a parser's corpus."""
    folder = CORPUS / name
    return sorted(folder.iterdir()) if folder.is_dir() else []


def examples(name: str) -> list[bytes]:
    """Returns its saved inputs, and those that are made."""
    made = http_bodies.good_requests() if name == "http_body" else []
    return [*made, *(path.read_bytes() for path in saved_inputs(name))]
