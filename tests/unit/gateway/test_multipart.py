from collections.abc import AsyncGenerator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.gateway_config import RequestLimits
from gateway.intake.multipart import MultipartStream, Part, boundary_of
from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason

LIMITS = RequestLimits()
EDGE = b"--edge\r\n"
END = b"\r\n--edge--\r\n"


def field(name: str, value: bytes = b"x", extra: bytes = b"") -> bytes:
    return b'Content-Disposition: form-data; name="' + name.encode() + b'"' + extra + b"\r\n\r\n" + value


async def parts_of(raw: bytes) -> list[Part]:
    async def pieces() -> AsyncGenerator[bytes]:
        yield raw

    return await MultipartStream(pieces(), b"edge", LIMITS).parts()


async def test_fields_and_files_round_trip() -> None:
    upload = field("file", b"\r\n\x00--edge\r\n--edg", b'; filename="C:\\\\a/../b.wav"\r\nContent-Type: audio/wav; x=1')
    raw = EDGE + upload + b"\r\n" + EDGE + field("model", "tiný".encode()) + b"\r\n" + EDGE + field("empty", b"") + END
    file, model, empty = await parts_of(raw)
    assert (file.name, file.filename, file.media_type, file.data) == (
        "file",
        "b.wav",
        "audio/wav",
        b"\r\n\x00--edge\r\n--edg",
    )
    assert (model.name, model.filename, model.text()) == ("model", None, "tiný")
    assert empty.data == b""


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        # A screenshot of macOS 14, which has a narrow no-break space.
        ("Screenshot 2026-11-29 at 3.45.12\u202fPM.png", "Screenshot 2026-11-29 at 3.45.12 PM.png"),
        ("\u4f1a\u8b70\u3000\u9332\u97f3.wav", "\u4f1a\u8b70 \u9332\u97f3.wav"),
        ("\U0001f468\u200d\U0001f469.png", "\U0001f468_\U0001f469.png"),
    ],
)
async def test_file_name_with_characters_without_a_glyph_is_accepted(sent: str, kept: str) -> None:
    (file,) = await parts_of(EDGE + field("file", b"x", f'; filename="{sent}"'.encode()) + END)
    assert (file.filename, kept.isprintable()) == (kept, True)


@pytest.mark.parametrize(
    ("raw", "reason", "words"),
    [
        (b"", Reason.MALFORMED_REQUEST, "begin with its boundary"),
        (b"preamble\r\n" + EDGE + field("a") + END, Reason.MALFORMED_REQUEST, "begin with its boundary"),
        (EDGE, Reason.MALFORMED_REQUEST, "within the headers"),
        (EDGE + field("a"), Reason.MALFORMED_REQUEST, "ends in the middle of a part"),
        (EDGE + field("a") + b"\r\n--edge", Reason.MALFORMED_REQUEST, "not at the end of its line"),
        (EDGE + b"\r\nx" + END, Reason.MALFORMED_REQUEST, "header of a part is malformed"),
        (EDGE + b"Content-Type: text/plain\r\n\r\nx" + END, Reason.MALFORMED_REQUEST, "no name"),
        (EDGE + field("") + END, Reason.MALFORMED_REQUEST, "no name"),
        (EDGE + field("n" * 257) + END, Reason.MALFORMED_REQUEST, "no name"),
        (EDGE + field("a", b"x", b'; filename="a\x00b"') + END, Reason.MALFORMED_REQUEST, "control characters"),
        (EDGE + field("a", b"x", b'; filename="\xff"') + END, Reason.MALFORMED_REQUEST, "UTF-8"),
        (EDGE + b"X: " + b"y" * 9000 + b"\r\n\r\nx" + END, Reason.REQUEST_TOO_LARGE, "longer than 8192"),
        ((EDGE + field("a") + b"\r\n") * 21 + b"--edge--", Reason.REQUEST_TOO_LARGE, "more than 20 parts"),
        ((EDGE + field("a") + b"\r\n") * 10_000, Reason.REQUEST_TOO_LARGE, "more than 20 parts"),
    ],
)
async def test_incomplete_or_oversized_form_is_refused(raw: bytes, reason: Reason, words: str) -> None:
    with pytest.raises(WeftError, match=words) as refused:
        await parts_of(raw)
    assert refused.value.reason is reason


@pytest.mark.parametrize(
    ("content_type", "reason"),
    [
        (b"multipart/form-data", Reason.MALFORMED_REQUEST),
        (b"multipart/form-data; boundary=", Reason.MALFORMED_REQUEST),
        (b'multipart/form-data; boundary="a\x01b"', Reason.MALFORMED_REQUEST),
        (b"multipart/form-data; boundary=" + b"x" * 71, Reason.REQUEST_TOO_LARGE),
        (b"multipart/form-data; boundary=" + b"x" * 10_000_000, Reason.REQUEST_TOO_LARGE),
    ],
    ids=lambda value: str(value)[:60],
)
def test_missing_or_oversized_boundary_is_refused(content_type: bytes, reason: Reason) -> None:
    with pytest.raises(WeftError) as refused:
        boundary_of(content_type)
    assert refused.value.reason is reason


def test_boundary_may_be_quoted() -> None:
    assert boundary_of(b'multipart/form-data; charset=utf-8; boundary="a b"') == b"a b"


def test_values_are_decoded_as_text_and_files_are_not() -> None:
    with pytest.raises(FieldError, match="not a file"):
        Part(name="model", data=b"x", filename="x").text()
    with pytest.raises(FieldError, match="UTF-8"):
        Part(name="model", data=b"\xff").text()


@example(b"--edge\r\n\r\n\r\n--edge--")
@given(
    st.lists(st.sampled_from([b"--edge", b"\r\n", b"--", field("a"), b"x", b"\r\n--edge--"]), max_size=12).map(b"".join)
)
async def test_arbitrary_bytes_parse_or_raise_a_caller_error(raw: bytes) -> None:
    try:
        await parts_of(raw)
    except WeftError as error:
        assert error.traits.http_status in {400, 413}  # noqa: PT017 - nothing raised is fine, too
