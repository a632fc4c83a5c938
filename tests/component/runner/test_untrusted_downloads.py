"""Downloads from servers whose answers do not fit together: what is stored is one whole file, or nothing."""

import hashlib
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx2
import pytest
from kit.failures import expect_failure
from kit.gguf_bytes import gguf, tensor
from typing_extensions import override

from runner_svc.model_store.http_file import MAX_RESTARTS, FileOrder, FileTransfer, TransferPorts
from runner_svc.model_store.store import ROOM_BYTES
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

VALUES = 50_000
OLD = gguf(tensors=[tensor("t", [VALUES])], data=b"o" * 4 * VALUES)
NEW = gguf(tensors=[tensor("t", [VALUES])], data=b"n" * 4 * VALUES)
GROWN = gguf(tensors=[tensor("t", [VALUES + 1000])], data=b"g" * 4 * (VALUES + 1000))
CUT = 120_000
DATED = {"last-modified": "Tue, 14 Nov 2023 22:13:20 GMT"}
DATED_LATER = {"last-modified": "Wed, 15 Nov 2023 22:13:20 GMT"}
TAGGED = {"etag": '"v1"'}


@dataclass(kw_only=True)
class Answer:
    """What the server says to one request."""

    content: bytes
    status: int = 0
    """0: as the range of the request demands."""
    headers: Mapping[str, str] = field(default_factory=dict)
    span: str | None = None
    """The Content-Range; None: the right one; empty: none."""
    begin: int | None = None
    """Where the body begins; None: where the request demands."""
    end: int | None = None
    cut: int | None = None
    is_framed: bool = True


def handler(answers: list[Answer], ranges: list[str | None]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        @override
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            answer = answers.pop(0) if len(answers) > 1 else answers[0]
            asked = self.headers.get("range")
            ranges.append(asked)
            start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
            whole = len(answer.content)
            if start >= whole and not answer.status:
                self.send_response(416)
                self.send_header("content-range", f"bytes */{whole}")
                self.send_header("content-length", "0")
                self.end_headers()
                return
            begin = start if answer.begin is None else answer.begin
            body = answer.content[begin : answer.end]
            self.send_response(answer.status or (206 if start else 200))
            for name, value in answer.headers.items():
                self.send_header(name, value)
            span = f"bytes {begin}-{begin + len(body) - 1}/{whole}" if answer.span is None else answer.span
            if start and span:
                self.send_header("content-range", span)
            self.send_header(*(("content-length", str(len(body))) if answer.is_framed else ("connection", "close")))
            self.end_headers()
            self.wfile.write(body[: answer.cut])
            self.close_connection = answer.cut is not None or not answer.is_framed

    return Handler


class Server:
    """A server that gives the answers in order, the last one for ever."""

    def __init__(self, *answers: Answer) -> None:
        self.ranges: list[str | None] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler([*answers], self.ranges))
        self._server.daemon_threads = True

    @contextmanager
    def running(self) -> Iterator["Server"]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def load(self, folder: Path, *, name: str = "m.gguf", sha256: str = "", room: int = 2**62) -> bytes:
        def require_room(coming: int) -> None:
            nonlocal room
            room -= coming
            if room < 0:
                raise WeftError(Reason.INVALID_ARGUMENT, "there is no room")

        url = f"http://127.0.0.1:{self._server.server_port}/{name}"
        order = FileOrder(name=name, url=url, partial=folder / "partial", sha256=sha256)
        with httpx2.Client() as client:
            ports = TransferPorts(
                client=client, on_bytes=lambda _: None, require_room=require_room, sleep=lambda _: None
            )
            FileTransfer(order, ports).run()
        return (folder / "partial").read_bytes()

    def refusal(self, folder: Path, name: str = "m.gguf", *, room: int = 2**62) -> WeftError:
        with pytest.raises(WeftError) as raised:
            self.load(folder, name=name, room=room)
        return raised.value


def first(headers: Mapping[str, str] = TAGGED, content: bytes = OLD) -> Answer:
    return Answer(content=content, headers=headers, cut=CUT)


@pytest.mark.parametrize("sha256", ["", "right"])
def test_part_with_the_status_of_a_whole_file_is_appended(tmp_path: Path, sha256: str) -> None:
    digest = hashlib.sha256(OLD).hexdigest() if sha256 else ""
    with Server(first(), Answer(content=OLD, headers=TAGGED, status=200)).running() as server:
        assert server.load(tmp_path, sha256=digest) == OLD
        assert server.ranges == [None, f"bytes={CUT}-"]


def test_part_without_a_label_is_not_taken_for_the_whole_file(tmp_path: Path) -> None:
    unlabelled = Answer(content=OLD, headers=TAGGED, status=200, span="")
    with Server(first(), unlabelled, Answer(content=OLD, headers=TAGGED)).running() as server:
        assert server.load(tmp_path) == OLD
        assert server.ranges == [None, f"bytes={CUT}-", None]


@pytest.mark.parametrize(
    ("headers", "second"),
    [
        (TAGGED, Answer(content=GROWN, headers=TAGGED)),
        (TAGGED, Answer(content=NEW, headers={"etag": '"v2"'})),
        ({"etag": 'W/"v1"'} | DATED, Answer(content=NEW, headers={"etag": 'W/"v2"'} | DATED)),
        (DATED, Answer(content=NEW, headers=DATED_LATER)),
        (DATED, Answer(content=GROWN, headers=DATED)),
        ({}, Answer(content=NEW)),
        (TAGGED, Answer(content=OLD[: CUT // 2], headers=TAGGED)),
        (TAGGED, Answer(content=OLD, headers=TAGGED, begin=CUT - 1000)),
        (TAGGED, Answer(content=OLD, headers=TAGGED, span=f"bytes {CUT}-{CUT - 1}/{len(OLD)}")),
        (TAGGED, Answer(content=OLD, headers=TAGGED, span=f"bytes {CUT}-{len(OLD)}/{len(OLD)}")),
        (TAGGED, Answer(content=OLD, headers=TAGGED, span=f"items {CUT}-{len(OLD) - 1}/{len(OLD)}")),
        (TAGGED, Answer(content=OLD, headers=TAGGED, span="nonsense")),
        (TAGGED, Answer(content=NEW, headers={"etag": '"v2"'}, is_framed=False, status=200, begin=0, span="")),
    ],
)
def test_file_that_changes_during_a_download_is_downloaded_again(
    tmp_path: Path, headers: Mapping[str, str], second: Answer
) -> None:
    with Server(first(headers), second, Answer(content=NEW, headers=headers)).running() as server:
        assert server.load(tmp_path) == NEW


def test_file_that_changes_with_every_answer_ends_the_download(tmp_path: Path) -> None:
    versions = [Answer(content=OLD, headers={"etag": f'"{number}"'}, cut=CUT) for number in range(20)]
    with Server(*versions).running() as server:
        error = server.refusal(tmp_path)
        assert len(server.ranges) <= 2 * (MAX_RESTARTS + 1)
    expect_failure(error, Reason.SERVICE_UNAVAILABLE, "the file has changed at the server")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("headers", [TAGGED, DATED])
def test_download_is_resumed_where_the_server_identifies_its_file(tmp_path: Path, headers: Mapping[str, str]) -> None:
    with Server(first(headers), Answer(content=OLD, headers=headers)).running() as server:
        assert server.load(tmp_path) == OLD
        assert server.ranges == [None, f"bytes={CUT}-"]


def test_broken_download_without_any_validator_starts_again(tmp_path: Path) -> None:
    with Server(first({}), Answer(content=OLD)).running() as server:
        assert server.load(tmp_path) == OLD
        assert server.ranges == [None, None]


def test_parts_without_a_total_are_requested_until_the_file_ends(tmp_path: Path) -> None:
    parts = [
        Answer(content=OLD, headers=TAGGED, end=end, span=f"bytes {begin}-{end - 1}/*")
        for begin, end in ((CUT, CUT + 30_000), (CUT + 30_000, len(OLD)))
    ]
    unframed = Answer(content=OLD[:CUT], headers=TAGGED, is_framed=False, status=206, span="")
    unframed.headers = TAGGED | {"content-range": f"bytes 0-{CUT - 1}/*"}
    with Server(unframed, *parts, Answer(content=OLD, headers=TAGGED)).running() as server:
        assert server.load(tmp_path) == OLD
        assert server.ranges[-1] == f"bytes={len(OLD)}-"


@pytest.mark.parametrize("status", [200, 206])
@pytest.mark.parametrize("name", ["m.gguf", "m.safetensors", "tokenizer.json"])
def test_content_without_length_is_stored_only_if_its_header_accounts_for_it(
    tmp_path: Path, name: str, status: int
) -> None:
    head = b'{"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    tensors = struct.pack("<Q", len(head)) + head + b"1234"
    whole = {"m.gguf": OLD, "m.safetensors": tensors, "tokenizer.json": b"{}"}[name]
    headers = {"content-range": f"bytes 0-{len(whole) - 1}/{len(whole)}"} if status == 206 else {}
    for content in (whole, whole[:-1], whole + b"more than padding can be, which is 32 bytes"):
        length = {"content-range": f"bytes 0-{len(content) - 1}/{len(content)}"} if status == 206 else {}
        answer = Answer(content=content, headers=length or headers, is_framed=False, status=status)
        with Server(answer).running() as server:
            if (content == whole and name != "tokenizer.json") or (name == "tokenizer.json" and status == 206):
                assert server.load(tmp_path, name=name) == content
            else:
                expect_failure(server.refusal(tmp_path, name), Reason.BACKEND_PROTOCOL_ERROR, name)
                assert not any(tmp_path.iterdir())


def test_tensors_of_an_unknown_type_and_later_versions_are_judged_by_length(tmp_path: Path) -> None:
    for content in (gguf(tensors=[tensor("t", [9], kind=99)], data=b"12345"), b"GGUF" + struct.pack("<I", 9) + b"new"):
        with Server(Answer(content=content)).running() as server:
            assert server.load(tmp_path) == content


def test_space_is_checked_again_while_a_file_of_unknown_length_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner_svc.model_store.store.ROOM_BYTES", 50_000)
    assert ROOM_BYTES == 64 * 1024**2
    with Server(Answer(content=OLD, headers=TAGGED, is_framed=False)).running() as server:
        expect_failure(server.refusal(tmp_path, room=120_000), Reason.INVALID_ARGUMENT, "no room")
        # What can be resumed is kept.
        assert 0 < (tmp_path / "partial").stat().st_size <= 120_000
    with Server(Answer(content=OLD, is_framed=False)).running() as server:
        server.refusal(tmp_path, room=120_000)
        assert not any(tmp_path.iterdir())
