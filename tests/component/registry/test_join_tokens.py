"""Tokens with which dial-out runners join."""

import asyncio
import re
from datetime import timedelta
from pathlib import Path

from google.protobuf.duration_pb2 import Duration
from kit.refusals import refused
from registry_harness import RunningRegistry, running_registry

from weft.api.registry.v1 import join_token_service_pb2
from weft.kernel.errors.reasons import Reason
from weft_testing.fake_clock import FakeClock

Create = join_token_service_pb2.CreateJoinTokenRequest
Check = join_token_service_pb2.CheckJoinTokenRequest
List = join_token_service_pb2.ListJoinTokensRequest
Revoke = join_token_service_pb2.RevokeJoinTokenRequest


async def make(
    mesh: RunningRegistry, description: str = "", seconds: int = 0, *, reusable: bool = True, **limits: str
) -> tuple[str, str]:
    """Id and whole text of a new token."""
    lifetime = Duration(seconds=seconds) if seconds else None
    request = Create(description=description, lifetime=lifetime, reusable=reusable, **limits)
    response = await mesh.tokens.CreateJoinToken(request)
    return response.join_token.id, response.token


async def test_token_is_valid_until_revoked(mesh: RunningRegistry) -> None:
    token_id, token = await make(mesh, "alice's laptop")
    assert re.fullmatch(rf"wjt_{token_id}_[0-9a-f]{{64}}", token)
    assert len(token_id) == 12
    checked = (await mesh.tokens.CheckJoinToken(Check(token=token))).join_token
    assert (checked.id, checked.description, checked.HasField("expire_time")) == (token_id, "alice's laptop", True)
    await mesh.tokens.RevokeJoinToken(Revoke(id=token_id))
    with refused(Reason.UNAUTHENTICATED):
        await mesh.tokens.CheckJoinToken(Check(token=token))
    with refused(Reason.NOT_FOUND):
        await mesh.tokens.RevokeJoinToken(Revoke(id=token_id))


async def test_rejection_does_not_reveal_which_check_failed(mesh: RunningRegistry) -> None:
    token_id, token = await make(mesh)
    _, expired = await make(mesh, seconds=60)
    await mesh.advance(60.0)
    messages = set()
    wrong = token[:-1] + ("0" if token[-1] != "0" else "1")
    for text in (
        "",
        "wjt_",
        f"wjt_{token_id}_",
        f"wjt_{token_id}",
        wrong,
        expired,
        token + "_",
        "\u00e9" * 500,
        token.upper(),
    ):
        with refused(Reason.UNAUTHENTICATED) as errors:
            await mesh.tokens.CheckJoinToken(Check(token=text))
        messages.add((errors[0].message, *errors[0].metadata.items()))
    assert len(messages) == 1
    await mesh.tokens.CheckJoinToken(Check(token=token))


async def test_tokens_survive_a_restart_and_only_their_hashes_are_on_disk(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_registry(tmp_path, clock=clock) as before:
        _, token = await make(before, "kept")
        _, expiring = await make(before, seconds=3600)
    async with running_registry(tmp_path, clock=clock) as after:
        await after.tokens.CheckJoinToken(Check(token=token))
        await after.tokens.CheckJoinToken(Check(token=expiring))
    secret = token.rpartition("_")[2].encode()
    assert not files_with(tmp_path, secret)
    assert files_with(tmp_path, b"kept"), "the search finds what is there"


async def test_token_created_with_a_fast_clock_is_valid_only_for_its_lifetime(tmp_path: Path) -> None:
    clock = FakeClock()
    clock.set_wall(86_400.0)
    async with running_registry(tmp_path, clock=clock) as before:
        _, token = await make(before, seconds=600)
    clock.set_wall(-86_400.0)
    async with running_registry(tmp_path, clock=clock) as after:
        await after.advance(60.0)
        await after.tokens.CheckJoinToken(Check(token=token))
        await after.advance(600.0)
        with refused(Reason.UNAUTHENTICATED):
            await after.tokens.CheckJoinToken(Check(token=token))
        (listed,) = (await after.tokens.ListJoinTokens(List())).join_tokens
        assert listed.create_time.ToDatetime() <= clock.utc_now().replace(tzinfo=None)


def files_with(folder: Path, text: bytes) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_file() and text in path.read_bytes()]


async def test_token_limit_is_enforced_and_expired_tokens_do_not_count(tmp_path: Path) -> None:
    async with running_registry(tmp_path, max_join_tokens=2) as mesh:
        await make(mesh, seconds=60)
        await make(mesh)
        with refused(Reason.TOO_MANY_RESOURCES):
            await make(mesh)
        await mesh.advance(60.0)
        await make(mesh)


async def test_invalid_requests_are_rejected(mesh: RunningRegistry) -> None:
    for request_ in (
        Create(description="x" * 129),
        Create(description="a\nb"),
        Create(lifetime=Duration(seconds=59)),
        Create(lifetime=Duration(seconds=-1)),
        Create(lifetime=Duration()),
        Create(lifetime=Duration(seconds=11 * 366 * 86_400)),
        Create(lifetime=Duration(seconds=2**62)),
        Create(name_pattern="desk-[ab]*"),
        Create(name_pattern="agent/*"),
        Create(pool="a b"),
    ):
        with refused(Reason.INVALID_ARGUMENT):
            await mesh.tokens.CreateJoinToken(request_)
        assert not (await mesh.tokens.ListJoinTokens(List())).join_tokens


def credential(name: str, secret: str = "0") -> str:
    return f"wjm_{name:0<12}_{secret * 64}"


async def test_token_without_a_lifetime_ends_after_seven_days(mesh: RunningRegistry) -> None:
    _, token = await make(mesh)
    mesh.clock._utc += timedelta(days=7, seconds=-1)
    await mesh.tokens.CheckJoinToken(Check(token=token))
    mesh.clock._utc += timedelta(seconds=1)
    with refused(Reason.UNAUTHENTICATED):
        await mesh.tokens.CheckJoinToken(Check(token=token))


async def test_first_machine_takes_the_place_of_its_token(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_registry(tmp_path, clock=clock) as mesh:
        token_id, token = await make(mesh, "desk", reusable=False, name_pattern="desk-*", pool="qwen")
        with refused(Reason.UNAUTHENTICATED) as errors:
            await mesh.tokens.CheckJoinToken(Check(token=token))
        assert "credential" in errors[0].message
        joined = (await mesh.tokens.CheckJoinToken(Check(token=token, machine=credential("desk")))).join_token
        shown = (joined.id, joined.machine, joined.name_pattern, joined.pool, joined.description)
        assert shown == ("desk00000000", True, "desk-*", "qwen", "desk")
        assert not joined.HasField("expire_time")
        for wrong in (
            Check(token=token),
            Check(token=token, machine=credential("thief")),
            Check(token=token, machine=credential("desk", "1")),
            Check(token=credential("desk"), machine=""),
            Check(machine=f"wjt_{token_id}_{token.rpartition('_')[2]}"),
        ):
            with refused(Reason.UNAUTHENTICATED):
                await mesh.tokens.CheckJoinToken(wrong)
        # A used token also reaches the machine that used it: the first answer may be lost.
        assert (await mesh.tokens.CheckJoinToken(Check(token=token, machine=credential("desk")))).join_token == joined
    async with running_registry(tmp_path, clock=clock) as mesh:
        clock._utc += timedelta(days=40)
        assert (await mesh.tokens.CheckJoinToken(Check(machine=credential("desk")))).join_token == joined
        (listed,) = (await mesh.tokens.ListJoinTokens(List())).join_tokens
        assert listed == joined
    assert not files_with(tmp_path, b"0" * 64)


async def test_machine_gets_the_rights_of_a_newer_token_and_no_token_takes_its_credential(
    mesh: RunningRegistry,
) -> None:
    _, first = await make(mesh, reusable=False)
    await mesh.tokens.CheckJoinToken(Check(token=first, machine=credential("desk")))
    _, wider = await make(mesh, reusable=False, pool="qwen")
    with refused(Reason.UNAUTHENTICATED):
        await mesh.tokens.CheckJoinToken(Check(token=wider, machine=credential("desk", "1")))
    for machine in ("wjm_short_" + "0" * 64, "wjm_desk00000000_weak", "wjm_DESK00000000_" + "0" * 64):
        with refused(Reason.UNAUTHENTICATED):
            await mesh.tokens.CheckJoinToken(Check(token=wider, machine=machine))
    joined = (await mesh.tokens.CheckJoinToken(Check(token=wider, machine=credential("desk")))).join_token
    assert (joined.id, joined.pool) == ("desk00000000", "qwen")


async def test_machine_does_not_take_the_place_of_a_reusable_token_with_its_id_and_secret(
    mesh: RunningRegistry,
) -> None:
    token_id, shared = await make(mesh)
    _, fresh = await make(mesh, reusable=False)
    with refused(Reason.UNAUTHENTICATED):
        await mesh.tokens.CheckJoinToken(Check(token=fresh, machine=f"wjm_{token_id}_{shared.rpartition('_')[2]}"))
    assert (await mesh.tokens.CheckJoinToken(Check(token=shared))).join_token.id == token_id


async def test_two_machines_with_one_token_are_one_and_a_refusal(mesh: RunningRegistry) -> None:
    _, token = await make(mesh, reusable=False)
    checks = (mesh.tokens.CheckJoinToken(Check(token=token, machine=credential(name))) for name in ("a", "b", "c"))
    found = await asyncio.gather(*checks, return_exceptions=True)
    assert sum(not isinstance(each, BaseException) for each in found) == 1


async def test_reusable_token_admits_machines_by_itself(mesh: RunningRegistry) -> None:
    token_id, token = await make(mesh)
    for machine in ("", credential("a"), credential("b")):
        assert (await mesh.tokens.CheckJoinToken(Check(token=token, machine=machine))).join_token.id == token_id
