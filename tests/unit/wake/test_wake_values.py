"""Magic packets, variables in headers, and words that must not be told."""

import pytest

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.wake.http_request import substituted
from weft.wake.recipes import is_mac_address, magic_packet, redacted


@pytest.mark.parametrize("text", ["00:11:22:aa:BB:cc", "00-11-22-aa-BB-cc"])
def test_magic_packet_is_six_ff_bytes_and_sixteen_addresses(text: str) -> None:
    packet = magic_packet(text)
    assert len(packet) == 102
    assert packet[:6] == b"\xff" * 6
    assert packet[6:] == bytes.fromhex("001122aabbcc") * 16


@pytest.mark.parametrize(
    "text", ["", "00:11:22:aa:bb", "00:11:22:aa:bb:cc:dd", "00:11:22:aa:bb:cg", "001122aabbcc", "00:11:22:aa:bb:cc\n"]
)
def test_invalid_hardware_address_is_refused(text: str) -> None:
    assert not is_mac_address(text)
    with pytest.raises(ValueError, match="not a hardware address"):
        magic_packet(text)


def test_header_variable_is_replaced_by_its_value() -> None:
    headers = {"Authorization": "Bearer ${WEFT_WAKE_TOKEN}", "X-Plain": "as it is"}
    assert substituted(headers, {"WEFT_WAKE_TOKEN": "s3cret"}) == {
        "Authorization": "Bearer s3cret",
        "X-Plain": "as it is",
    }


@pytest.mark.parametrize("text", ["${HOME}", "${WEFT_DATABASE_URL}", "$WEFT_WAKE_TOKEN", "${weft_wake_token}"])
def test_no_other_environment_variable_can_be_read(text: str) -> None:
    environment = {"HOME": "/root", "WEFT_DATABASE_URL": "x", "WEFT_WAKE_TOKEN": "s3cret"}
    assert substituted({"h": text}, environment) == {"h": text}


def test_substituted_value_is_not_expanded_again() -> None:
    environment = {"WEFT_WAKE_A": "${WEFT_WAKE_B}", "WEFT_WAKE_B": "b"}
    assert substituted({"h": "${WEFT_WAKE_A}"}, environment) == {"h": "${WEFT_WAKE_B}"}


def test_unset_variable_is_reported_by_name() -> None:
    with pytest.raises(WeftError) as failed:
        substituted({"h": "Bearer ${WEFT_WAKE_TOKEN}"}, {})
    assert failed.value.reason is Reason.WAKE_FAILED
    assert "WEFT_WAKE_TOKEN" in failed.value.message


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("see https://10.0.0.5:8000/v1?x=1 for more", "see [hidden] for more"),
        ("Cannot connect to host gpu-box:8000 ssl", "Cannot connect to host [hidden] ssl"),
        ("('gpu-box', 8000)", "('[hidden]', [hidden])"),
        ("Incorrect API key provided: sk-1234.", "Incorrect API key provided: [hidden]."),
        ("context of 18000 tokens", "context of 18000 tokens"),
    ],
)
def test_urls_and_secrets_are_redacted_from_foreign_messages(text: str, hidden: str) -> None:
    assert redacted(text, ("gpu-box:8000", "gpu-box", "8000", "sk-1234", "")) == hidden


@pytest.mark.parametrize("text", ["key_{}_end", "Bearer%20{}", "headers:\\nBearer\\n{}", "it's {}"])
def test_long_secret_is_redacted_wherever_it_stands_and_also_if_it_is_cut(text: str) -> None:
    secret = "sk-proj-0123456789abcdef"
    assert redacted(text.format(secret), (secret,)) == text.format("[hidden]")
    before = text.partition("{")[0]
    assert redacted(before + secret[:-1], (secret,)) == before + "[hidden]"
    assert redacted(before + secret.upper(), (secret,)) == before + "[hidden]"
