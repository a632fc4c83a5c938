"""Invitations of runners: one word that says where, by which certificate, and with which token."""

import asyncio
import socket
import struct
from pathlib import Path
from typing import cast

import grpc
import pytest

from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.compose.authority import self_signed_certificate
from weft_app.compose.invitation import invitation_to, invitation_to_relays, parse_invitation
from weft_app.compose.join_address import JoinAddress, JoinDialer, Trust
from weft_app.compose.machine import this_machine
from weft_app.compose.relay import RelayEndpoint

PIN = "sha256:" + "ab" * 32
TOKEN = "wjt_abcdefghijkl_" + "0" * 64


def test_invitation_contains_everything_a_runner_needs() -> None:
    text = f"weft://{TOKEN}@192.168.1.5:7443,[fd00::5]:7443,box.local:7443/{PIN}"
    found = parse_invitation(text)
    assert [address.target for address in found.addresses] == ["192.168.1.5:7443", "[fd00::5]:7443", "box.local:7443"]
    assert all(address.is_tls for address in found.addresses)
    assert (found.trust, found.token) == (Trust(fingerprint=PIN), TOKEN)
    assert found.text == text
    assert TOKEN not in repr(found)


@pytest.mark.parametrize(
    "text",
    [
        "weft://",
        "weft://192.168.1.5:7443",
        f"weft://@192.168.1.5:7443/{PIN}",
        f"weft://{TOKEN}@",
        f"weft://{TOKEN}@/{PIN}",
        f"weft://{TOKEN}@box:x/{PIN}",
        f"weft://{TOKEN}@box:7443/",
        f"weft://{TOKEN}@box:7443/sha256:12",
        f"weft://{TOKEN}@box:7443/{PIN}/more",
        f"weft://to ken@box:7443/{PIN}",
        f"weft://{TOKEN}@{','.join(['box:7443'] * 9)}/{PIN}",
        f"weft://{TOKEN}@{'b' * 2000}:7443/{PIN}",
    ],
)
def test_incomplete_invitation_is_refused_without_echoing_its_token(text: str) -> None:
    with pytest.raises(FieldError) as caught:
        parse_invitation(text)
    assert caught.value.field == "URL"
    assert TOKEN not in caught.value.message


def test_relay_on_all_addresses_invites_to_reachable_ones() -> None:
    endpoint = RelayEndpoint(url="https://box:7443", fingerprint=PIN, is_everywhere=True)
    found = invitation_to(endpoint, TOKEN)
    assert found is not None
    assert parse_invitation(found.text) == found
    hosts = {address.host for address in found.addresses}
    assert hosts <= {*this_machine().all, "box"}
    assert not hosts & {"127.0.0.1", "localhost", "0.0.0.0"}


def test_relay_with_a_public_certificate_invites_by_name_with_system_trust() -> None:
    found = invitation_to(RelayEndpoint(url="https://mesh.example:7443", is_everywhere=True), TOKEN)
    assert found is not None
    assert found.text == f"weft://{TOKEN}@mesh.example:7443"
    assert parse_invitation(found.text).trust == Trust()


def test_loopback_relay_has_no_invitation() -> None:
    assert invitation_to(RelayEndpoint(url="http://127.0.0.1:7443"), TOKEN) is None


async def test_runner_redials_if_no_address_is_reachable() -> None:
    """On another network the first address may be a stranger's, which is no reason to give up."""
    dead = [JoinAddress(host="127.0.0.1", port=port, is_tls=True) for port in (1, 2)]
    with pytest.raises(WeftError) as caught:
        await JoinDialer(dead, Trust(fingerprint=PIN)).open()
    assert caught.value.reason is Reason.CONNECT_FAILED


async def test_failure_of_each_address_is_reported(tmp_path: Path) -> None:
    """The address that cannot be reached does not hide the one that shows another certificate."""
    certificate = self_signed_certificate(tmp_path, [])
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", certificate.credentials())
    await server.start()
    try:
        stranger = JoinAddress(host="127.0.0.1", port=port, is_tls=True)
        dead = JoinAddress(host="127.0.0.1", port=1, is_tls=True)
        with pytest.raises(WeftError) as caught:
            await JoinDialer([stranger, dead], Trust(fingerprint=PIN)).open()
        assert caught.value.reason is Reason.CONNECT_FAILED, "it dials again"
        first, *_, last = caught.value.message.split("; ")
        assert first == f"127.0.0.1:{port} showed another certificate than the one with this fingerprint"
        assert last == "127.0.0.1:1 cannot be reached"
        with pytest.raises(WeftError) as caught:
            await JoinDialer([stranger, stranger], Trust(fingerprint=PIN)).open()
        assert caught.value.reason is Reason.PERMISSION_DENIED
        assert caught.value.message.count("another certificate") == 1
    finally:
        await server.stop(None)


async def test_address_that_resets_the_connection_is_not_called_unreachable() -> None:
    def reset(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()

    async with await asyncio.start_server(reset, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(WeftError) as caught:
            await JoinDialer([JoinAddress(host="127.0.0.1", port=port, is_tls=True)], Trust(fingerprint=PIN)).open()
    assert caught.value.message == f"127.0.0.1:{port} does not answer with TLS"


class _Dials:
    """The relays that a runner dials, one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *hosts: str) -> None:
        self.dead: set[str] = set()
        self._dialed = ""
        monkeypatch.setattr("weft_app.compose.join_address.open_join_channel", self._open)
        self._dialer = JoinDialer([JoinAddress(host=host, port=7443, is_tls=True) for host in hosts], Trust())

    async def _open(self, address: JoinAddress, _: Trust) -> grpc.aio.Channel:
        if address.host in self.dead:
            raise WeftError(Reason.CONNECT_FAILED, f"{address.target} cannot be reached")
        self._dialed = address.host
        return cast("grpc.aio.Channel", None)

    async def dial(self, *, is_linked: bool) -> str:
        await self._dialer.open()
        if is_linked:
            self._dialer.note_linked()
        return self._dialed


async def test_next_relay_is_dialed_after_a_refused_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one of a router that stops, or one that has its greatest number of links."""
    dials = _Dials(monkeypatch, "one", "two", "three")
    assert [await dials.dial(is_linked=False) for _ in range(4)] == ["one", "two", "three", "one"]


async def test_previously_linked_runner_dials_the_first_address_first(monkeypatch: pytest.MonkeyPatch) -> None:
    dials = _Dials(monkeypatch, "one", "two")
    assert await dials.dial(is_linked=False) == "one"
    assert await dials.dial(is_linked=True) == "two"
    assert await dials.dial(is_linked=True) == "one"


async def test_unreachable_address_is_skipped_in_the_same_dial(monkeypatch: pytest.MonkeyPatch) -> None:
    dials = _Dials(monkeypatch, "one", "two", "three")
    dials.dead = {"one", "three"}
    assert [await dials.dial(is_linked=False) for _ in range(2)] == ["two", "two"]


def test_one_invitation_lists_relays_of_several_routers() -> None:
    found = invitation_to_relays(["r1.lan:7443", "r2.lan:7443"], PIN, TOKEN)
    assert found.text == f"weft://{TOKEN}@r1.lan:7443,r2.lan:7443/{PIN}"
    assert parse_invitation(found.text) == found


@pytest.mark.parametrize("target", ["r1.lan", "r1.lan:x", "https://r1.lan:7443", ":7443", ""])
def test_invitation_relay_is_a_host_and_a_port(target: str) -> None:
    with pytest.raises(FieldError):
        invitation_to_relays([target], PIN, TOKEN)
