"""Announced meshes: what is read of an announcement, which one is joined, and what the user is asked."""

from collections.abc import Sequence

import pytest
import typer

from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.cli.join import JoinDialog, announced_mesh, ask_mesh, require_some
from weft_app.compose.join_address import JoinAddress, Trust
from weft_app.compose.mdns_announcement import (
    MAX_ADDRESSES,
    MAX_VERSION_CHARS,
    Announcement,
    joined_mesh,
    listed,
    parse_announcement,
)
from weft_app.compose.startable import require_announceable
from weft_app.config.loader import load_config

PIN, OTHER_PIN = "sha256:" + "ab" * 32, "sha256:" + "cd" * 32
TOKEN = "wjt_abcdefghijkl_" + "0" * 64


def mesh(name: str = "atlas", pin: str = PIN, *addresses: str) -> Announcement:
    return Announcement(name=name, port=7443, addresses=addresses or ("192.168.1.5",), fingerprint=pin, version="0.1.0")


def said(**values: str) -> dict[bytes, bytes | None]:
    return {key.encode(): value.encode() for key, value in values.items()}


def test_announcement_round_trips() -> None:
    one = mesh()
    assert parse_announcement(one.name, one.port, said(**one.properties), one.addresses) == one


def test_announcement_contains_only_fingerprint_and_version() -> None:
    assert mesh().properties == {"fp": PIN, "version": "0.1.0"}


@pytest.mark.parametrize(
    ("name", "port", "properties", "addresses"),
    [
        ("", 7443, said(fp=PIN), ["192.168.1.5"]),
        ("a" * 64, 7443, said(fp=PIN), ["192.168.1.5"]),
        ("atlas", 0, said(fp=PIN), ["192.168.1.5"]),
        ("atlas", None, said(fp=PIN), ["192.168.1.5"]),
        ("atlas", 7443, said(fp=PIN), []),
        ("atlas", 7443, said(fp=PIN), ["0.0.0.0", "224.0.0.251", "fe80::1", "no address"]),
        ("atlas", 7443, said(fp="sha256:12"), ["192.168.1.5"]),
        ("atlas", 7443, said(fp=PIN.upper()), ["192.168.1.5"]),
        ("atlas", 7443, {b"fp": b"\xff\xfe"}, ["192.168.1.5"]),
    ],
)
def test_invalid_announcement_is_ignored(
    name: str, port: int | None, properties: dict[bytes, bytes | None], addresses: Sequence[str]
) -> None:
    assert parse_announcement(name, port, properties, addresses) is None


def test_announcement_is_bounded() -> None:
    many = [f"10.0.0.{number}" for number in range(1, 100)]
    found = parse_announcement("atlas", 7443, said(version="9" * 200), [*many, *many])
    assert found is not None
    assert (len(found.addresses), len(found.version)) == (MAX_ADDRESSES, MAX_VERSION_CHARS)
    assert found.fingerprint == ""


def test_mesh_with_the_fingerprint_is_joined_at_every_announced_address() -> None:
    found = [mesh("atlas", OTHER_PIN, "10.0.0.1"), mesh("b", PIN, "10.0.0.2"), mesh("b-2", PIN, "10.0.0.2", "10.0.0.3")]
    assert [each.target for each in joined_mesh(found, PIN)] == ["10.0.0.2:7443", "10.0.0.3:7443"]


def test_announcement_with_another_fingerprint_is_refused_for_any_name() -> None:
    with pytest.raises(WeftError, match=r"only atlas at 192.168.1.5:7443, sha256:cdcd") as caught:
        joined_mesh([mesh("atlas", OTHER_PIN)], PIN)
    assert caught.value.reason is Reason.NOT_FOUND
    assert "weft runner token create" in caught.value.message


class Answers:
    """A user at a terminal."""

    def __init__(self, *, number: str = "1", secret: str = TOKEN, same: bool = True) -> None:
        self.shown: list[str] = []
        self.dialog = JoinDialog(
            ask=lambda _: number, ask_secret=lambda _: secret, confirm=lambda _: same, show=self.shown.append
        )


def test_token_needs_a_user_confirmed_fingerprint() -> None:
    user = Answers(number="2")
    found = ask_mesh([mesh("a", OTHER_PIN), mesh("b", PIN, "10.0.0.2")], "", user.dialog)
    assert (found.trust, found.token) == (Trust(fingerprint=PIN), TOKEN)
    assert found.addresses == (JoinAddress(host="10.0.0.2", port=7443, is_tls=True),)
    assert any("announcements can be forged" in line for line in user.shown)
    assert f"  {PIN}" in user.shown
    assert not any(TOKEN in line for line in user.shown)
    with pytest.raises(typer.Exit):
        ask_mesh([mesh()], TOKEN, Answers(same=False).dialog)


def test_invitation_needs_no_confirmation() -> None:
    user = Answers(secret=f"weft://{TOKEN}@10.9.9.9:7443/{PIN}", same=False)
    found = ask_mesh([mesh()], "", user.dialog)
    assert [each.target for each in found.addresses] == ["192.168.1.5:7443", "10.9.9.9:7443"]
    assert (found.trust, found.token) == (Trust(fingerprint=PIN), TOKEN)


@pytest.mark.parametrize("pin", [f"/{OTHER_PIN}", ""])
def test_mesh_with_a_different_fingerprint_than_the_invitation_is_refused(pin: str) -> None:
    with pytest.raises(WeftError, match="do not join there") as caught:
        ask_mesh([mesh()], "", Answers(secret=f"weft://{TOKEN}@10.9.9.9:7443{pin}").dialog)
    assert caught.value.reason is Reason.PERMISSION_DENIED


def test_mesh_with_a_public_certificate_is_joined_only_by_invitation() -> None:
    with pytest.raises(WeftError, match="public authority"):
        ask_mesh([mesh(pin="")], TOKEN, Answers().dialog)
    invitation = f"weft://{TOKEN}@mesh.example:7443"
    assert ask_mesh([mesh(pin="")], "", Answers(secret=invitation).dialog).trust == Trust()


@pytest.mark.parametrize("number", ["0", "2", "x", "", "-1", "9" * 50, "00011"])
def test_number_outside_the_list_is_refused(number: str) -> None:
    with pytest.raises(WeftError, match="not a number from 1 to 1"):
        ask_mesh([mesh()], TOKEN, Answers(number=number).dialog)


@pytest.fixture
def found_on_the_network(monkeypatch: pytest.MonkeyPatch) -> list[Announcement]:
    found: list[Announcement] = []

    async def find() -> tuple[Announcement, ...]:
        return tuple(found)

    monkeypatch.setattr("weft_app.cli.join.find_meshes", find)
    return found


def no_token() -> str:
    raise FieldError("--token", "is required")


def test_meshes_are_listed_with_the_join_command_without_a_terminal(
    found_on_the_network: list[Announcement], capsys: pytest.CaptureFixture[str]
) -> None:
    found_on_the_network.append(mesh())
    with pytest.raises(WeftError, match=r"weft runner join --fingerprint sha256:... --token-file FILE"):
        announced_mesh(None, no_token, "")
    assert f"atlas at 192.168.1.5:7443, {PIN}" in capsys.readouterr().err


def test_fingerprint_and_token_need_no_terminal(found_on_the_network: list[Announcement]) -> None:
    found_on_the_network += [mesh("a", OTHER_PIN), mesh("b", PIN)]
    invitation, find = announced_mesh(PIN, lambda: TOKEN, TOKEN)
    assert (invitation.trust, invitation.token) == (Trust(fingerprint=PIN), TOKEN)
    assert find is not None
    with pytest.raises(FieldError, match="is required"):
        announced_mesh(PIN, no_token, "")


def test_error_without_announcements_suggests_an_alternative() -> None:
    with pytest.raises(WeftError, match=r"weft up --host 0.0.0.0 --announce announces one.*weft runner token create"):
        require_some([])


def test_listed_mesh_shows_address_and_trust_in_one_line() -> None:
    lines = listed([mesh("a", PIN, "10.0.0.1", "fd00::5"), mesh("b", "")])
    assert lines == [
        f"a at 10.0.0.1:7443, [fd00::5]:7443, {PIN}",
        "b at 192.168.1.5:7443, certificate of a public authority",
    ]


@pytest.mark.parametrize("relay", [{}, {"listen": "127.0.0.1:7443"}, {"listen": "[::1]:7443"}])
def test_mesh_that_no_machine_can_join_is_not_announced(relay: dict[str, str]) -> None:
    config = load_config(None, {"announce": {"enabled": True}, "relay": relay})
    with pytest.raises(FieldError) as caught:
        require_announceable(config)
    assert caught.value.field == "announce.enabled"
    require_announceable(load_config(None, {"announce": {"enabled": True}, "relay": {"listen": "0.0.0.0:7443"}}))
