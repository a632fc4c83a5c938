"""A pair of registries whose owner is killed, frozen, stopped or cut off: one serves and writes at any time."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import yaml
from mesh_process import eventually, run_weft
from registry_pair import Member, Pair, running_pair, until

from weft.api.registry.v1 import (
    join_token_service_pb2,
    join_token_service_pb2_grpc,
    key_service_pb2,
    key_service_pb2_grpc,
    registry_service_pb2,
    registry_service_pb2_grpc,
)
from weft.kernel.channels.rpc import error_from_call
from weft.kernel.errors.reasons import Reason
from weft_app.cli.grpc_calls import call_registry
from weft_testing.cut_socket import cut_socket
from weft_testing.postgres_server import PostgresServer

pytest_plugins = ("database_fixtures",)

SILENCE_SECONDS = 3.0
CALL_SECONDS = 10.0
STATUS_SECONDS = 10.0


@pytest.fixture
def pair(tmp_path: Path, postgres_url: str) -> Iterator[Pair]:
    with running_pair(tmp_path, postgres_url, owner_silence_seconds=SILENCE_SECONDS) as pair:
        yield pair


def make_token(member: Member, description: str) -> None:
    """Writes a row."""
    with grpc.insecure_channel(member.address) as channel:
        stub = join_token_service_pb2_grpc.JoinTokenServiceStub(channel)
        stub.CreateJoinToken(
            join_token_service_pb2.CreateJoinTokenRequest(description=description), timeout=CALL_SECONDS
        )


def tokens(member: Member) -> list[str]:
    with grpc.insecure_channel(member.address) as channel:
        stub = join_token_service_pb2_grpc.JoinTokenServiceStub(channel)
        answer = stub.ListJoinTokens(join_token_service_pb2.ListJoinTokensRequest(), timeout=CALL_SECONDS)
    return sorted(each.description for each in answer.join_tokens)


def listed_on_host(member: Member) -> list[str]:
    """The tokens as a command with the home of a member lists them."""
    stub = join_token_service_pb2_grpc.JoinTokenServiceStub
    answer = call_registry(member.home, stub, "ListJoinTokens", join_token_service_pb2.ListJoinTokensRequest())
    return sorted(each.description for each in answer.join_tokens)


def wrote(member: Member, description: str) -> bool:
    """Whether a member took a row, or was not there or not the owner."""
    try:
        make_token(member, description)
    except grpc.RpcError:
        return False
    return True


def tokens_or_none(member: Member) -> list[str] | None:
    try:
        return tokens(member)
    except grpc.RpcError:
        return None


def refusal(member: Member) -> tuple[Reason, str]:
    """Why a member answers nothing, and whom it names."""
    with grpc.insecure_channel(member.address) as channel:
        stub = registry_service_pb2_grpc.RegistryServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.ListResources(registry_service_pb2.ListResourcesRequest(kind="model"), timeout=CALL_SECONDS)
    error = error_from_call(refused.value, Reason.SERVICE_UNAVAILABLE)
    return error.reason, error.metadata.get("address", "")


def test_standby_does_not_serve_but_points_to_the_owner_and_takes_over_when_it_is_killed(pair: Pair) -> None:
    first, second = pair.members
    make_token(first, "before")
    until(lambda: refusal(second) == (Reason.REGISTRY_STANDBY, first.address))
    assert not second.serves
    first.send(signal.SIGKILL)
    until(lambda: second.serves)
    first.wait()
    make_token(second, "after")
    assert tokens(second) == ["after", "before"]
    # The one that was killed comes back as the standby.
    first.start()
    until(lambda: refusal(first) == (Reason.REGISTRY_STANDBY, second.address))
    assert not first.serves


@pytest.mark.nightly("freezes and cuts an owner of the database")
def test_frozen_owner_is_replaced_and_neither_writes_nor_serves_after_resuming(
    pair: Pair, postgres: PostgresServer, postgres_database: str
) -> None:
    first, second = pair.members
    make_token(first, "before")
    until(lambda: "a standby waits" in first.said())
    first.send(signal.SIGSTOP)
    until(lambda: second.serves)
    make_token(second, "after")
    owned = "SELECT owner || backend_pid FROM ownership"
    owner = postgres.sql(owned, postgres_database)
    first.send(signal.SIGCONT)
    with grpc.insecure_channel(first.address) as channel:
        stub = join_token_service_pb2_grpc.JoinTokenServiceStub(channel)
        while first.process is not None and first.process.poll() is None:
            with pytest.raises(grpc.RpcError):
                stub.CreateJoinToken(join_token_service_pb2.CreateJoinTokenRequest(description="never"), timeout=1.0)
    assert first.wait() == 1
    assert "another registry has taken over this database" in first.said()
    assert postgres.sql(owned, postgres_database) == owner
    assert tokens(second) == ["after", "before"]


async def test_status_and_doctor_show_the_database_owner_and_the_standby(pair: Pair, tmp_path: Path) -> None:
    first, second = pair.members
    until(lambda: refusal(second) == (Reason.REGISTRY_STANDBY, first.address))

    async def is_said() -> bool:
        # Health is observed once a second: what was observed before may not name the owner yet.
        code, shown, _ = await run_weft("status", home=second.home)
        return code == 0 and f"the registry at {first.address} owns the database; this one waits for its end" in shown

    await eventually(is_said, STATUS_SECONDS, "the status of the standby does not name the owner")
    config = tmp_path / "weft.yaml"
    config.write_text(yaml.safe_dump({"addresses": {"registry": [each.address for each in pair.members]}}))
    _, shown, _ = await run_weft("doctor", "--config", str(config), home=tmp_path / "client")
    assert f"{first.address} owns the database; {second.address} is its standby" in shown


@pytest.mark.nightly("another end of an owner")
def test_commands_that_call_the_registry_of_a_standby_host_reach_the_owner(pair: Pair) -> None:
    first, second = pair.members
    known = second.home / "run" / "registry.owner"
    until(lambda: known.exists() and known.read_text() == first.address)
    make_token(first, "before")
    assert listed_on_host(second) == ["before"]
    # One that has taken over answers for itself.
    first.send(signal.SIGKILL)
    first.wait()
    until(lambda: second.serves)
    assert listed_on_host(second) == ["before"]
    second.send(signal.SIGTERM)
    assert second.wait() == 0
    assert not known.exists()


def test_standby_requires_the_pepper_used_for_existing_keys(pair: Pair, tmp_path: Path, postgres_url: str) -> None:
    owner = pair.members[0]
    with grpc.insecure_channel(owner.address) as channel:
        stub = key_service_pb2_grpc.KeyServiceStub(channel)
        stub.CreateKey(key_service_pb2.CreateKeyRequest(description="first"), timeout=CALL_SECONDS)
    third = Member(tmp_path / "third", database_url=postgres_url)
    try:
        with pytest.raises(AssertionError):
            third.start()
        assert third.wait() != 0
        assert "copy the file from the owner's machine" in third.said()
        (third.home / "state").mkdir(exist_ok=True)
        shutil.copy(owner.home / "state" / "key-pepper", third.home / "state" / "key-pepper")
        third.start()
        until(lambda: "its standby" in third.said())
    finally:
        third.end()


@pytest.mark.nightly("freezes and cuts an owner of the database")
def test_replaced_owner_without_a_database_connection_answers_nothing(
    tmp_path: Path, postgres: PostgresServer, postgres_database: str, postgres_url: str
) -> None:
    with (
        cut_socket(tmp_path / postgres.socket.name, postgres.socket) as network,
        running_pair(
            tmp_path,
            postgres_url,
            first_url=postgres.url(postgres_database, tmp_path),
            owner_silence_seconds=SILENCE_SECONDS,
        ) as pair,
    ):
        first, second = pair.members
        make_token(first, "before")
        until(lambda: "a standby waits" in first.said())
        network.cut()
        until(lambda: second.serves)
        # It works, and its callers reach it; it has known for a while that it may have been replaced.
        assert refusal(first)[0] is Reason.REGISTRY_STANDBY
        make_token(second, "after")
        network.heal()
        assert first.wait() == 1
        assert "another registry has taken over this database" in first.said()
        assert tokens(second) == ["after", "before"]


@pytest.mark.nightly("freezes and cuts an owner of the database")
def test_postgres_crash_leaves_one_owner_with_all_acknowledged_writes(
    pair: Pair, postgres: PostgresServer, postgres_database: str
) -> None:
    make_token(pair.members[0], "before")
    backend = "SELECT backend_pid FROM ownership"
    until(lambda: bool(postgres.sql(backend, postgres_database)))
    os.kill(int(postgres.sql(backend, postgres_database)), signal.SIGKILL)
    until(lambda: any(wrote(each, "after") for each in pair.members))
    (owner,) = [each for each in pair.members if each.process is not None and tokens_or_none(each) is not None]
    assert tokens(owner) == ["after", "before"]
