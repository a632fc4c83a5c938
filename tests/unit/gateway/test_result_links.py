"""Signed addresses of results: whom they let in, and how long."""

from urllib.parse import parse_qs, urlsplit

import pytest

from gateway.errors import EdgeError
from gateway.result_links import ResultLinks, SignedResult
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_testing.fake_clock import FakeClock

KEY = bytes(range(32))


def links(key: bytes = KEY, clock: FakeClock | None = None, public_url: str = "") -> ResultLinks:
    return ResultLinks(key, clock or FakeClock(), link_seconds=60.0, public_url=public_url)


def parts(link: str, **changed: str) -> SignedResult:
    url = urlsplit(link)
    query = {name: values[0] for name, values in parse_qs(url.query).items()}
    fields = {"file_id": url.path.rpartition("/")[2], **query, **changed}
    return SignedResult(**fields)


async def test_link_is_valid_until_it_expires() -> None:
    clock = FakeClock()
    made = links(clock=clock)
    link = made.link("https://weft.example", "ann", "file-1")
    assert link.startswith("https://weft.example/v1/results/file-1?")
    made.require_valid(parts(link))
    await clock.advance(61)
    with pytest.raises(EdgeError) as gone:
        made.require_valid(parts(link))
    assert (gone.value.http_status, gone.value.reason) == (410, Reason.NOT_FOUND)


@pytest.mark.parametrize(
    "changed",
    [
        {"file_id": "file-2"},
        {"tenant": "bob"},
        {"expires": "99999999999"},
        {"signature": "A" * 43},
        {"signature": ""},
        {"signature": "é"},
        {"tenant": "ann\0file-1"},
        {"expires": ""},
    ],
)
def test_modified_link_is_not_found(changed: dict[str, str]) -> None:
    made = links()
    with pytest.raises(WeftError) as refused:
        made.require_valid(parts(made.link("", "ann", "file-1"), **changed))
    assert not isinstance(refused.value, EdgeError)
    assert refused.value.reason is Reason.NOT_FOUND


def test_tenant_and_id_boundary_is_part_of_the_signature() -> None:
    made = links()
    link = made.link("", "ann-1", "file-2")
    with pytest.raises(WeftError):
        made.require_valid(parts(link, tenant="ann", file_id="1-file-2"))


def test_another_key_signs_different_links() -> None:
    with pytest.raises(WeftError):
        links(bytes(32)).require_valid(parts(links().link("", "ann", "file-1")))
    with pytest.raises(ValueError, match="32 bytes"):
        links(b"short")


@pytest.mark.parametrize(
    ("public_url", "base"), [("", "http://127.0.0.1:8080"), ("https://weft.example/", "https://weft.example")]
)
def test_links_use_the_base_url_of_the_caller(public_url: str, base: str) -> None:
    scope = {"type": "http", "scheme": "http", "headers": [(b"host", b"127.0.0.1:8080")]}
    assert links(public_url=public_url).base_of(scope) == base
