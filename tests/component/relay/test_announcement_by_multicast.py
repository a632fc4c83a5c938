"""The announcement of a mesh and the meshes that are found, by multicast on loopback."""

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from zeroconf import IPVersion
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.compose.mdns_announcement import SERVICE_TYPE, Announcement, find_meshes, open_multicast
from weft_app.compose.mdns_announcer import NO_ADDRESS, Announcer
from weft_app.config.config import AnnounceSettings
from weft_testing.fake_clock import FakeClock

pytestmark = pytest.mark.slow("announces meshes on the network")

LOOPBACK = ("127.0.0.1",)
LISTEN_SECONDS = 0.3
MAX_LISTEN_SECONDS = 10.0


def announcer(name: str, pin: str, addresses: list[str]) -> Announcer:
    said = Announcement(name=name, port=7443, addresses=(), fingerprint=pin, version="0.1.0")
    settings = AnnounceSettings(enabled=True, interfaces=LOOPBACK)
    return Announcer(said, settings, FakeClock(), lambda: tuple(addresses))


@asynccontextmanager
async def running(one: Announcer) -> AsyncIterator[Announcer]:
    await one.start()
    try:
        yield one
    finally:
        await one.stop()


async def found(*pins: str, seconds: float = LISTEN_SECONDS) -> list[Announcement]:
    """The meshes of this test: another one may run beside it on the same machine."""
    return [mesh for mesh in await find_meshes(seconds, LOOPBACK) if mesh.fingerprint in pins]


async def all_found(*pins: str) -> list[Announcement]:
    """The meshes of this test, once each is found: one that has just answered repeats that a second later only."""
    seconds = LISTEN_SECONDS
    while len(meshes := await found(*pins, seconds=seconds)) < len(pins) and seconds < MAX_LISTEN_SECONDS:
        seconds *= 2
    return meshes


def new_pin() -> str:
    return f"sha256:{uuid.uuid4().hex * 2}"


async def test_announced_mesh_is_found_follows_its_addresses_and_says_goodbye() -> None:
    name, pin, addresses = f"atlas-{uuid.uuid4().hex[:8]}", new_pin(), ["192.168.1.5"]
    async with running(announcer(name, pin, addresses)) as one:
        assert (one.state.name, one.state.why_not) == (name, "")
        (mesh,) = await found(pin)
        assert mesh == Announcement(name=name, port=7443, addresses=("192.168.1.5",), fingerprint=pin, version="0.1.0")
        addresses[:] = ["192.168.1.6", "10.0.0.1"]
        await one.check()
        (mesh,) = await found(pin)
        assert set(mesh.addresses) == {"192.168.1.6", "10.0.0.1"}
        addresses.clear()
        await one.check()
        assert one.state.why_not.startswith(NO_ADDRESS)
        assert await found(pin) == []
        addresses.append("192.168.1.5")
        await one.check()
        assert one.state.name == name
        assert len(await found(pin)) == 1
    assert await found(pin) == []


async def test_two_meshes_of_one_name_are_announced_under_distinct_names() -> None:
    name, pins = f"twin-{uuid.uuid4().hex[:8]}", (new_pin(), new_pin())
    first, second = (announcer(name, pin, ["192.168.1.5"]) for pin in pins)
    async with running(first), running(second):
        assert (first.state.name, second.state.name) == (name, f"{name}-2")
        meshes = await all_found(*pins)
        assert [(mesh.name, mesh.fingerprint) for mesh in meshes] == [(name, pins[0]), (f"{name}-2", pins[1])]


async def test_foreign_announcements_of_the_service_are_harmless() -> None:
    pin = new_pin()
    foreign = AsyncServiceInfo(
        SERVICE_TYPE,
        f"bad-{uuid.uuid4().hex[:8]}.{SERVICE_TYPE}",
        port=7443,
        properties={"fp": "sha256:short"},
        server=f"bad-{uuid.uuid4().hex[:8]}.local.",
        parsed_addresses=["192.168.1.66"],
    )
    async with AsyncZeroconf(interfaces=list(LOOPBACK), ip_version=IPVersion.V4Only) as other:
        await other.async_register_service(foreign, cooperating_responders=True)
        async with running(announcer(f"good-{uuid.uuid4().hex[:8]}", pin, ["192.168.1.5"])):
            meshes = await find_meshes(LISTEN_SECONDS, LOOPBACK)
    assert pin in [mesh.fingerprint for mesh in meshes]
    assert "192.168.1.66" not in [address for mesh in meshes for address in mesh.addresses]


async def test_machine_without_multicast_is_reported_with_the_alternative(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object = ()) -> AsyncZeroconf:
        raise OSError(19, "No such device")

    monkeypatch.setattr("weft_app.compose.mdns_announcement.open_multicast", refuse)
    monkeypatch.setattr("weft_app.compose.mdns_announcer.open_multicast", refuse)
    with pytest.raises(WeftError, match="no multicast DNS: No such device; join with the command that") as caught:
        await find_meshes(LISTEN_SECONDS)
    assert caught.value.reason is Reason.CONNECT_FAILED
    async with running(announcer("atlas", new_pin(), ["192.168.1.5"])) as one:
        assert one.state.name == ""
        assert "No such device" in one.state.why_not
        monkeypatch.setattr("weft_app.compose.mdns_announcer.open_multicast", open_multicast)
        await one.check()
        assert (one.state.name != "", one.state.why_not) == (True, "")
