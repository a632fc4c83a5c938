"""Bodies that arrive compressed: what they become, and what is refused."""

import gzip
import sys
from collections.abc import Callable

import pytest

from gateway.errors import EdgeError
from gateway.intake.body import decoded, decoder_of
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.text.content_coding import MAX_PARTS, ZSTD_WINDOW_BITS, BodyDecoder

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

TEXT = b"".join(b"line %d\n" % number for number in range(1000))
CODINGS = [("gzip", gzip.compress), ("x-gzip", gzip.compress), ("zstd", zstd.compress)]
Compress = Callable[[bytes], bytes]
both = pytest.mark.parametrize(("coding", "compress"), CODINGS)


def piecewise(decoder: BodyDecoder, coded: bytes, *, size: int, step: int) -> bytes:
    """The decoded bytes of what arrives in pieces, decoded in steps."""
    found = []
    for start in range(0, len(coded), size):
        found.append(decoder.decode(coded[start : start + size], step))
        while decoder.has_more:
            found.append(decoder.decode(b"", step))
    decoder.require_end()
    assert max(map(len, found)) <= step
    return b"".join(found)


@both
@pytest.mark.parametrize(("size", "step"), [(1, 1_000_000), (7, 100), (100_000, 64), (100_000, len(TEXT))])
def test_decoded_body_is_the_same_for_any_chunking(coding: str, compress: Compress, size: int, step: int) -> None:
    assert piecewise(BodyDecoder(coding), compress(TEXT), size=size, step=step) == TEXT


@both
@pytest.mark.parametrize("size", [3, 100_000])
def test_multi_part_body_is_concatenated(coding: str, compress: Compress, size: int) -> None:
    coded = compress(b"a" * 1000) + compress(b"") + compress(b"b" * 1000)
    assert piecewise(BodyDecoder(coding), coded, size=size, step=64) == b"a" * 1000 + b"b" * 1000


@both
def test_expanding_body_is_decoded_only_up_to_its_limit(coding: str, compress: Compress) -> None:
    coded = compress(b"\0" * 50_000_000)
    assert len(decoded(coded, BodyDecoder(coding), 1000)) == 1001


@both
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda coded: coded[:-1], "is incomplete"),
        (lambda coded: coded[: len(coded) // 2], "is incomplete"),
        (lambda coded: coded + b"rest of it", "cannot be decoded"),
        (lambda coded: b"{}" + coded, "cannot be decoded"),
        (lambda coded: coded[:20] + b"\xff\xff\xff\xff" + coded[24:], "body"),
    ],
)
def test_truncated_or_damaged_body_is_refused(coding: str, compress: Compress, spoil: Compress, words: str) -> None:
    with pytest.raises(WeftError, match=words):
        decoded(spoil(compress(TEXT)), BodyDecoder(coding), 10 * len(TEXT))


@both
def test_body_with_too_many_parts_is_refused(coding: str, compress: Compress) -> None:
    with pytest.raises(WeftError, match="parts"):
        decoded(compress(b"") * (MAX_PARTS + 1), BodyDecoder(coding), 1000)


def test_zstd_body_with_a_window_beyond_the_http_limit_is_refused() -> None:
    compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: ZSTD_WINDOW_BITS + 1})
    coded = compressor.compress(TEXT) + compressor.flush()
    with pytest.raises(WeftError, match="cannot be decoded"):
        decoded(coded, BodyDecoder("zstd"), 10 * len(TEXT))


@both
def test_empty_body_is_empty(coding: str, compress: Compress) -> None:
    assert decoded(b"", BodyDecoder(coding), 10) == decoded(compress(b""), BodyDecoder(coding), 10) == b""


@pytest.mark.parametrize("value", [None, b"", b"identity", b" Identity , "])
def test_body_without_a_coding_is_unchanged(value: bytes | None) -> None:
    assert decoder_of([] if value is None else [(b"content-encoding", value)]) is None


def test_codings_of_several_headers_are_one_list() -> None:
    with pytest.raises(EdgeError) as refused:
        decoder_of([(b"content-encoding", b"gzip"), (b"content-encoding", b"zstd")])
    assert refused.value.http_status == 415
