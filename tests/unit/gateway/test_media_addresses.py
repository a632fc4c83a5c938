"""Which media addresses may be fetched: reliability case M, and text that two parsers could read differently."""

from urllib.parse import urlsplit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from yarl import URL

from gateway.gateway_config import MediaConfig
from gateway.media.addresses import MAX_URL_CHARS, parse_url, require_allowed
from weft.kernel.channels.outbound import public_refusal
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.values.address import is_host_name, is_host_pattern

FIELD = "messages[3].content[1].image_url.url"
OPEN = MediaConfig(allowed_hosts=("images.example.org", "*.cdn.example.net", "odd.example.org:8443"))
ANYWHERE = MediaConfig(allowed_hosts=("*.com", "*.org", "*.example"), allow_plain_http=True)


@pytest.mark.parametrize(
    "url",
    [
        "https://images.example.org/a.png",
        "https://images.example.org",
        "HTTPS://Images.Example.ORG/a.png",
        "https://images.example.org:443/a.png?size=1&x=%20",
        "https://a.cdn.example.net/x",
        "https://a.b.cdn.example.net/x",
        "https://odd.example.org:8443/x",
    ],
)
def test_url_of_an_allowed_host_is_parsed(url: str) -> None:
    parts = require_allowed(url, FIELD, OPEN)
    seen = urlsplit(url)
    assert (parts.scheme, parts.host, parts.port) == ("https", seen.hostname, seen.port or 443)
    assert parts.target == (seen.path or "/") + (f"?{seen.query}" if seen.query else "")


@pytest.mark.parametrize(
    "url",
    [
        "https://example.org/a.png",
        "https://images.example.org.evil.com/a.png",
        "https://evilimages.example.org/a.png",
        "https://cdn.example.net/a.png",
        "https://evilcdn.example.net/a.png",
        "https://images.example.org:8443/a.png",
        "https://odd.example.org/a.png",
        "https://images.example.org./a.png",
        "http://images.example.org/a.png",
        "https://images.example.org:443443/a.png",
        "https://images.example.org:0/a.png",
        "https://images.example.org:/a.png",
    ],
)
def test_other_host_or_port_is_refused_with_its_field(url: str) -> None:
    with pytest.raises(FieldError) as refused:
        require_allowed(url, FIELD, OPEN)
    assert refused.value.field == FIELD


HOSTILE = [
    "file:///etc/passwd",
    "ftp://host.example.org/a",
    "gopher://host.example.org/1",
    "jar:https://host.example.org!/a",
    "//host.example.org/a",
    "https:/host.example.org/a",
    "https:host.example.org",
    "https://127.1/a",
    "https://127.0.0.1/a",
    "https://0x7f000001/a",
    "https://0x7f.1.org.0x1/a",
    "https://2130706433/a",
    "https://[::]/a",
    "https://[::1]/a",
    "https://[::ffff:127.0.0.1]/a",
    "https://169.254.169.254/latest/meta-data",
    "https://100.64.0.1/a",
    "https://localhost/a",
    "https://user@host.example.org/a",
    "https://user:secret@host.example.org/a",
    "https://host.example.org\\@127.0.0.1/a",
    "https://host.example.org\\.evil.com/a",
    "https://host.example.org#@127.0.0.1/a",
    "https://host.example.org/a#fragment",
    "https://host.example.org /a",
    " https://host.example.org/a",
    "https://host.example.org/a\n",
    "https://host.example.org/a\r\nHost: evil",
    "https://host.example.org/\x00",
    "https://host.example.org/%00",
    "https://host.example.org/%0d%0aHost:evil",
    "https://host.example.org/%5c",
    "https://host.example.org/%zz",
    "https://host.example.org/a b",
    "https://hóst.example.org/a",
    "https://host.example。org/a",
    "https://①.example.org/a",
    "https://-host.example.org/a",
    "https://host..example.org/a",
    "https://host_name.example.org/a",
    "https://" + "a" * 64 + ".example.org/",
    "https://" + "a." * 130 + "org/",
    "https://host.example.org/" + "a" * MAX_URL_CHARS,
    "https://",
    "https:///a",
    "",
]


@pytest.mark.parametrize("url", HOSTILE)
def test_malformed_url_is_refused_even_if_hosts_are_allowed(url: str) -> None:
    with pytest.raises(FieldError) as refused:
        require_allowed(url, FIELD, ANYWHERE)
    assert refused.value.field == FIELD
    assert "127.0.0.1" not in refused.value.message
    assert "secret" not in refused.value.message


def test_refusal_without_allowed_hosts_shows_how_to_allow_them() -> None:
    with pytest.raises(FieldError, match=r"gateway\.media\.allowed_hosts"):
        require_allowed("https://images.example.org/a.png", FIELD, MediaConfig())


def test_plain_http_requires_opt_in() -> None:
    assert require_allowed("http://a.example.org/a", FIELD, ANYWHERE).port == 80
    with pytest.raises(FieldError, match="allow_plain_http"):
        require_allowed("http://images.example.org/a", FIELD, OPEN)


@given(st.text(alphabet=st.sampled_from("htps:/\\@.?#%[]ax1 -é\n0:")))
@example("https://a.example.org:80\\@b.example.org/")
def test_three_parsers_agree_on_every_accepted_url(tail: str) -> None:
    url = f"https://a.example.org{tail}"
    parts = parse_url(url)
    if parts is None:
        return
    first, second = urlsplit(url), URL(url, encoded=True)
    assert parts.host == first.hostname == second.host
    assert parts.port == (first.port or 443) == second.port
    assert first.username is None
    assert second.user is None


NOT_PUBLIC = [
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.1",
    "100.64.0.1",
    "100.127.255.255",
    "127.0.0.1",
    "127.255.255.254",
    "168.63.129.16",
    "169.254.169.254",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.1",
    "192.0.0.192",
    "192.0.2.1",
    "192.88.99.1",
    "192.168.1.1",
    "198.18.0.1",
    "198.19.255.255",
    "198.51.100.7",
    "203.0.113.9",
    "224.0.0.1",
    "239.255.255.255",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::127.0.0.1",
    "::8.8.8.8",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::808:808",
    "100::1",
    "2001::7f00:1",
    "2001:0:4136:e378:8000:63bf:80ff:fffe",
    "2001:db8::1",
    "2001:10::1",
    "2001:20::1",
    "2002:7f00:1::",
    "2002:a00:1::1",
    "2002:c0a8:101::1",
    "3fff::1",
    "5f00::1",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fe80::1%eth0",
    "2606:4700::1111%1",
    "fec0::1",
    "ff02::1",
    "4000::1",
    "no address",
    "127.1",
    "",
]


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_non_public_address_is_refused_in_every_encoding(address: str) -> None:
    assert public_refusal(address) is not None


PUBLIC = "8.8.8.8 1.1.1.1 93.184.216.34 100.63.255.255 100.128.0.1 172.32.0.1 2606:4700:4700::1111 2001:4860:4860::8888"
PUBLIC_INSIDE = "::ffff:8.8.8.8 64:ff9b::808:808 2002:808:808::1"


@pytest.mark.parametrize("address", f"{PUBLIC} {PUBLIC_INSIDE}".split())
def test_public_address_is_accepted(address: str) -> None:
    assert public_refusal(address) is None


@given(st.ip_addresses(v=4))
def test_embedded_address_is_checked_like_the_inner_one(address: object) -> None:
    number = int(address)  # type: ignore[call-overload]
    inner = public_refusal(str(address)) is None
    high, low = number >> 16, number & 0xFFFF
    for wrapped in (f"::ffff:{high:x}:{low:x}", f"64:ff9b::{high:x}:{low:x}", f"2002:{high:x}:{low:x}::1"):
        assert (public_refusal(wrapped) is None) == inner


@pytest.mark.parametrize(
    "pattern", ["images.example.org", "*.example.org", "*.Example.org:8443", "xn--bcher-kva.example", "a.b:1"]
)
def test_host_pattern_is_a_name_or_a_wildcard_domain(pattern: str) -> None:
    assert is_host_pattern(pattern)


NAMES_WITHOUT_END = "* *. *.com. org *.org* a.*.org localhost"
NUMBERS_AND_PORTS = "127.0.0.1 [::1] a.org: a.org:0 a.org:65536 a.org:x"


@pytest.mark.parametrize(
    "pattern", ["", "a b.org", "https://a.org", "a.org/", *f"{NAMES_WITHOUT_END} {NUMBERS_AND_PORTS}".split()]
)
def test_other_text_is_not_a_host_pattern(pattern: str) -> None:
    assert not is_host_pattern(pattern)


def test_host_name_has_two_labels_and_a_letter_in_the_last() -> None:
    assert is_host_name("a.b")
    assert not is_host_name("A.b")
    assert not is_host_name("1.2.3.4")
