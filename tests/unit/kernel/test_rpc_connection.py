"""A connection of the server of this machine: frames in, calls and frames out, and its limits."""

import pytest

from weft.kernel.rpc_server.connection import (
    CONNECTION_WINDOW_BYTES,
    MAX_BLOCK_FRAMES_BYTES,
    MAX_FRAME_BYTES,
    MAX_PAUSED_BYTES,
    PREFACE,
    RESPONSE,
    STREAM_WINDOW_BYTES,
    BrokenConnectionError,
    Connection,
)
from weft.kernel.rpc_server.hpack import Headers, literal

DATA, HEADERS, RST, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = 0, 1, 3, 4, 5, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED = 1, 1, 4, 8
HEAD = literal(b":path", b"/a.B/C")


class Heard:
    """What a connection says of its calls."""

    def __init__(self) -> None:
        self.all: list[tuple[object, ...]] = []

    def opened(self, stream: int, headers: Headers) -> None:
        self.all.append(("opened", stream, dict(headers).get(b":path")))

    def message(self, stream: int, payload: bytes) -> None:
        self.all.append(("message", stream, payload))

    def half_closed(self, stream: int) -> None:
        self.all.append(("half_closed", stream))

    def reset(self, stream: int) -> None:
        self.all.append(("reset", stream))

    def resumed(self, stream: int) -> None:
        self.all.append(("resumed", stream))


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


def message(payload: bytes) -> bytes:
    return b"\0" + len(payload).to_bytes(4) + payload


def frames(data: bytes) -> list[tuple[int, int, int, bytes]]:
    found, place = [], 0
    while place < len(data):
        end = place + 9 + int.from_bytes(data[place : place + 3])
        number = int.from_bytes(data[place + 5 : place + 9])
        found.append((data[place + 3], data[place + 4], number, data[place + 9 : end]))
        place = end
    return found


def begun(max_streams: int = 8, max_message_bytes: int = 200_000) -> tuple[Connection, Heard]:
    heard = Heard()
    connection = Connection(
        heard, max_streams=max_streams, max_message_bytes=max_message_bytes, max_header_bytes=16_384
    )
    connection.receive(PREFACE + frame(SETTINGS, 0, 0))
    connection.take_output()
    return connection, heard


def called(connection: Connection, number: int = 1) -> None:
    connection.receive(frame(HEADERS, END_HEADERS, number, HEAD))


def test_a_call_is_heard_whole_however_its_bytes_are_cut() -> None:
    content = (
        PREFACE
        + frame(SETTINGS, 0, 0, b"\0\5\0\0\x40\0")
        + frame(HEADERS, 0, 1, HEAD[:4])
        + frame(CONTINUATION, END_HEADERS, 1, HEAD[4:])
        + frame(DATA, 0, 1, message(b"one") + message(b"two")[:3])
        + frame(DATA, PADDED, 1, b"\2" + message(b"two")[3:] + b"\0\0")
        + frame(DATA, END_STREAM, 1, message(b""))
    )
    wanted = [
        ("opened", 1, b"/a.B/C"),
        *(("message", 1, each) for each in (b"one", b"two", b"")),
        ("half_closed", 1),
    ]
    for size in (1, 2, 7, 11, len(content)):
        heard = Heard()
        connection = Connection(heard, max_streams=8, max_message_bytes=100, max_header_bytes=16_384)
        for place in range(0, len(content), size):
            connection.receive(content[place : place + size])
        assert heard.all == wanted, size


def test_an_answer_has_its_headers_once_and_ends_with_a_status() -> None:
    connection, _ = begun()
    called(connection)
    connection.receive(frame(DATA, END_STREAM, 1))
    connection.send(1, b"a")
    connection.send(1, b"b")
    connection.end(1, 5, b"no such thing")
    assert frames(connection.take_output()) == [
        (HEADERS, END_HEADERS, 1, RESPONSE),
        (DATA, 0, 1, message(b"a")),
        (DATA, 0, 1, message(b"b")),
        (
            HEADERS,
            END_HEADERS | END_STREAM,
            1,
            literal(b"grpc-status", b"5") + literal(b"grpc-message", b"no such thing"),
        ),
    ]
    assert not connection.is_open(1)


def test_a_caller_that_still_sends_is_stopped_and_what_it_sent_is_dropped() -> None:
    connection, heard = begun()
    called(connection)
    connection.end(1, 0)
    assert frames(connection.take_output())[-1] == (RST, 0, 1, bytes(4))
    connection.receive(frame(DATA, 0, 1, message(b"late")) + frame(RST, 0, 1, bytes(4)))
    assert heard.all == [("opened", 1, b"/a.B/C")]


def test_what_is_sent_waits_for_the_windows_of_the_call_and_of_the_connection() -> None:
    connection, heard = begun(max_message_bytes=10**7)
    called(connection)
    sent = b"x" * (MAX_PAUSED_BYTES + 200_000)
    connection.send(1, sent)
    connection.end(1, 0)
    found = frames(connection.take_output())
    assert sum(len(each[3]) for each in found if each[0] == DATA) == 65_535
    assert max(len(each[3]) for each in found) <= MAX_FRAME_BYTES
    assert connection.is_paused(1)
    connection.receive(frame(WINDOW, 0, 1, (10**7).to_bytes(4)))
    assert not connection.has_output, "the connection's own window is used up"
    connection.receive(frame(WINDOW, 0, 0, (10**7).to_bytes(4)))
    found += frames(connection.take_output())
    assert b"".join(each[3] for each in found if each[0] == DATA) == message(sent)
    assert heard.all[-1] == ("resumed", 1)
    assert found[-2][0] == HEADERS
    assert found[-2][1] & END_STREAM


def test_a_smaller_window_for_all_calls_holds_for_those_that_are_open() -> None:
    connection, _ = begun()
    called(connection)
    connection.receive(frame(SETTINGS, 0, 0, b"\0\4" + (10).to_bytes(4)))
    connection.take_output()
    connection.send(1, b"x" * 100)
    found = [each for each in frames(connection.take_output()) if each[0] == DATA]
    assert [len(each[3]) for each in found] == [10]


def test_what_arrives_is_acknowledged() -> None:
    connection, heard = begun(max_message_bytes=10**9, max_streams=2)
    called(connection)
    content = message(bytes(CONNECTION_WINDOW_BYTES))
    for place in range(0, len(content), MAX_FRAME_BYTES):
        connection.receive(frame(DATA, 0, 1, content[place : place + MAX_FRAME_BYTES]))
    windows = [each for each in frames(connection.take_output()) if each[0] == WINDOW]
    for number, window in ((0, CONNECTION_WINDOW_BYTES), (1, STREAM_WINDOW_BYTES)):
        more = sum(int.from_bytes(each[3]) for each in windows if each[2] == number)
        assert len(content) - window < more <= len(content)
    assert heard.all[-1] == ("message", 1, bytes(CONNECTION_WINDOW_BYTES))


def test_one_more_call_than_the_limit_is_refused_and_the_others_go_on() -> None:
    connection, heard = begun(max_streams=1)
    called(connection, 1)
    called(connection, 3)
    assert (RST, 0, 3, (7).to_bytes(4)) in frames(connection.take_output())
    connection.receive(frame(DATA, 0, 1, message(b"on")))
    assert heard.all == [("opened", 1, b"/a.B/C"), ("message", 1, b"on")]


def test_no_call_begins_after_the_goodbye() -> None:
    connection, heard = begun()
    called(connection, 1)
    connection.leave()
    called(connection, 3)
    found = frames(connection.take_output())
    assert [each[:3] for each in found] == [(GOAWAY, 0, 0), (RST, 0, 3)]
    assert heard.all == [("opened", 1, b"/a.B/C")]


@pytest.mark.parametrize("prefix", [b"\1\0\0\0\1", b"\0\0\3\x0d\x41"], ids=["compressed", "too large"])
def test_a_message_that_is_not_taken_costs_its_call_alone(prefix: bytes) -> None:
    connection, heard = begun(max_message_bytes=200_000)
    called(connection, 1)
    called(connection, 3)
    connection.receive(frame(DATA, 0, 1, prefix) + frame(DATA, 0, 3, message(b"on")))
    assert heard.all[2:] == [("reset", 1), ("message", 3, b"on")]
    assert not connection.is_open(1)


def test_a_ping_is_answered_and_its_answer_is_not() -> None:
    connection, _ = begun()
    connection.receive(frame(PING, 0, 0, b"12345678") + frame(PING, ACK, 0, b"12345678"))
    assert frames(connection.take_output()) == [(PING, ACK, 0, b"12345678")]


def test_frames_of_other_kinds_change_nothing() -> None:
    connection, heard = begun()
    connection.receive(frame(0xEE, 0xFF, 7, b"?") + frame(2, 0, 1, bytes(5)) + frame(GOAWAY, 0, 0, bytes(8)))
    assert not connection.has_output
    assert heard.all == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (frame(DATA, 0, 5, b"x"), "data of no call"),
        (frame(DATA, 0, 0, b"x"), "data of no call"),
        (frame(DATA, PADDED, 1, b"\5xx"), "padding"),
        (frame(DATA, END_STREAM, 1) + frame(DATA, 0, 1, b"x"), "after the end"),
        (frame(DATA, 0, 1, bytes(MAX_FRAME_BYTES + 1)), "larger than 16384"),
        (frame(HEADERS, END_HEADERS, 2, HEAD), "even"),
        (frame(HEADERS, END_HEADERS, 0, HEAD), "no call"),
        (frame(HEADERS, END_HEADERS, 1, HEAD), "come twice"),
        (frame(HEADERS, END_HEADERS, 3, b"\x80"), "no such header"),
        (frame(HEADERS, 0, 3, HEAD) + frame(PING, 0, 0, bytes(8)), "interrupted"),
        (frame(HEADERS, 0, 3, HEAD) + frame(CONTINUATION, END_HEADERS, 5, b""), "interrupted"),
        (frame(CONTINUATION, END_HEADERS, 1, HEAD), "without a beginning"),
        (
            frame(HEADERS, 0, 3, HEAD)
            + frame(CONTINUATION, 0, 3, bytes(MAX_FRAME_BYTES)) * (1 + MAX_BLOCK_FRAMES_BYTES // MAX_FRAME_BYTES),
            "larger than 65536",
        ),
        (frame(PUSH, 0, 1), "only servers push"),
        (frame(PING, 0, 0, b"short"), "ping"),
        (frame(RST, 0, 9, bytes(4)), "end of no call"),
        (frame(SETTINGS, 0, 0, b"\0"), "settings"),
        (frame(SETTINGS, 0, 0, b"\0\4" + b"\xff" * 4), "too large"),
        (frame(SETTINGS, 0, 0, b"\0\5" + bytes(4)), "size"),
        (frame(WINDOW, 0, 0, bytes(4)), "grows by nothing"),
        (frame(WINDOW, 0, 1, b"\x7f" + b"\xff" * 3), "too large"),
    ],
)
def test_a_peer_that_breaks_the_protocol_is_sent_away(content: bytes, words: str) -> None:
    connection, _ = begun()
    called(connection)
    with pytest.raises(BrokenConnectionError, match=words):
        connection.receive(content)
    kinds = [each[0] for each in frames(connection.take_output())]
    assert kinds[-1] == GOAWAY


def test_what_is_no_http2_is_sent_away_with_its_first_bytes() -> None:
    connection = Connection(Heard(), max_streams=8, max_message_bytes=100, max_header_bytes=100)
    with pytest.raises(BrokenConnectionError, match="no HTTP/2"):
        connection.receive(b"GET / HTTP/1.1\r\n")
