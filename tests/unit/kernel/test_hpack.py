"""Headers of HTTP/2, by the examples of RFC 7541 (appendix C) and by blocks that no sender makes."""

import pytest

from weft.kernel.rpc_server.hpack import HeaderDecoder, HpackError, literal, text_of

PATH = b"/envoy.service.ext_proc.v3.ExternalProcessor/Process"


def decoder() -> HeaderDecoder:
    return HeaderDecoder(max_bytes=4_096)


@pytest.mark.parametrize(
    "blocks",
    [
        (
            "828684410f7777772e6578616d706c652e636f6d",
            "828684be58086e6f2d6361636865",
            "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565",
        ),
        (
            "828684418cf1e3c2e5f23a6ba0ab90f4ff",
            "828684be5886a8eb10649cbf",
            "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
        ),
    ],
    ids=["plain", "Huffman"],
)
def test_the_requests_of_the_standards_examples_are_read(blocks: tuple[str, ...]) -> None:
    reader = decoder()
    first, second, third = (reader.decode(bytes.fromhex(block)) for block in blocks)
    named = (b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"www.example.com")
    assert first == named
    assert second == (*named, (b"cache-control", b"no-cache"))
    assert third == (
        (b":method", b"GET"),
        (b":scheme", b"https"),
        (b":path", b"/index.html"),
        (b":authority", b"www.example.com"),
        (b"custom-key", b"custom-value"),
    )


def test_a_number_means_what_came_last_also_where_the_same_block_comes_again() -> None:
    reader = decoder()
    reader.decode(b"\x40" + literal(b"a", b"1")[1:])
    assert reader.decode(b"\xbe") == ((b"a", b"1"),)
    assert reader.decode(b"\xbe") == ((b"a", b"1"),)
    reader.decode(b"\x40" + literal(b"a", b"2")[1:])
    assert reader.decode(b"\xbe") == ((b"a", b"2"),)


def test_old_headers_leave_a_full_table() -> None:
    reader = decoder()
    for number in range(3):
        reader.decode(b"\x40" + literal(b"a", b"%d" % number * 1_500)[1:])
    assert reader.decode(b"\xbe")[0][1] == b"2" * 1_500
    assert reader.decode(b"\xbf")[0][1] == b"1" * 1_500
    with pytest.raises(HpackError, match="no such header"):
        reader.decode(b"\xc0")


@pytest.mark.parametrize("length", [0, 1, 126, 127, 128, 254, 255, 3_000])
def test_a_literal_is_read_as_it_was_written(length: int) -> None:
    assert decoder().decode(literal(b"grpc-message", b"x" * length)) == ((b"grpc-message", b"x" * length),)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (b"\x80", "no such header"),
        (b"\xff\xff\xff\xff\xff\xff", "does not end, or is too large"),
        (b"\xff", "does not end"),
        (b"\x00", "ends within a header"),
        (b"\x00\x05ab", "ends within a string"),
        (b"\x00\x01a\x81\x00", "ends within a code"),
        (b"\x00\x01a\x84\xff\xff\xff\xff", "code of its end"),
        (b"\x3f\xff\xff\x03", "size"),
        (b"\x82\x20", "size"),
        (literal(b"a", b"x" * 4_096), "larger than 4096 bytes"),
    ],
)
def test_a_block_that_no_sender_makes_is_an_error(block: bytes, words: str) -> None:
    with pytest.raises(HpackError, match=words):
        decoder().decode(block)


def test_every_cut_of_a_block_is_an_error_or_a_shorter_list() -> None:
    block = bytes.fromhex("828684418cf1e3c2e5f23a6ba0ab90f4ff") + literal(b":path", PATH)
    whole = decoder().decode(block)
    for end in range(len(block)):
        try:
            found = decoder().decode(block[:end])
        except HpackError:
            continue
        assert found == whole[: len(found)]


def test_a_code_is_read_to_its_last_bit() -> None:
    assert text_of(bytes.fromhex("9d29ad171863c78f0b97c8e9ae82ae43d3")) == b"https://www.example.com"
