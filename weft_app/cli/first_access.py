"""What the first start of a mesh beyond loopback makes for its operator: an admin key, and an invitation of runners."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import grpc

from weft.api.registry.v1 import join_token_service_pb2, join_token_service_pb2_grpc, key_service_pb2
from weft.api.registry.v1.key_service_pb2_grpc import KeyServiceStub
from weft.documents.computed import key_state
from weft.kernel.errors import WeftError
from weft.kernel.file_replacement import replace_file
from weft.kernel.reasons import Reason
from weft.kernel.rpc import error_from_call, open_channel
from weft_app.cli.join_tokens import join_command
from weft_app.cli.keys import KeyRole, scopes_of
from weft_app.cli.options import note
from weft_app.compose.home import WeftHome

if TYPE_CHECKING:
    from weft_app.compose.up import UpHost

TIMEOUT_SECONDS = 5.0
SECONDS_OF_DAY = 86_400
INVITATION_DAYS = 30
"""Lifetime of the first invitation. A runner that joined with it needs a new one to dial again after that."""
KEY_FILE = "first-admin-key"
JOIN_FILE = "first-invitation"
DESCRIPTION = "made by the first start of weft up"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstAccess:
    """What was made; empty where it was there already, or not needed."""

    key: str = ""
    """The text of the admin key, where it is shown on a terminal."""
    key_file: Path | None = None
    """The file that holds it instead: what is not a terminal may be a log that others read."""
    join_command: str = ""
    join_file: Path | None = None


async def first_access(host: "UpHost", home: WeftHome, *, is_terminal: bool) -> FirstAccess:
    """Makes an admin key where callers need keys and there is none, and an invitation where runners may join.

    A registry that refuses leaves both empty: the banner then names the commands.
    """
    key = invitation = ""
    if not host.network_urls:
        return FirstAccess()
    try:
        async with open_channel(host.grpc_address) as channel:
            if host.asks_for_keys:
                key = await _first_key(channel)
            if host.relay is not None and host.relay.url.startswith("https://"):
                token = await _first_token(channel)
                invitation = join_command(home.root, token)[0] if token else ""
    except grpc.aio.AioRpcError as error:
        note(f"no first key was made: {error_from_call(error, Reason.SERVICE_UNAVAILABLE).message}")
    if is_terminal:
        return FirstAccess(key=key, join_command=invitation)
    return FirstAccess(key_file=_kept(home.root / KEY_FILE, key), join_file=_kept(home.root / JOIN_FILE, invitation))


async def _first_key(channel: grpc.aio.Channel) -> str:
    """Returns the text of a new admin key; empty where a key is valid already."""
    stub = cast("Any", KeyServiceStub(channel))
    found = await stub.ListKeys(key_service_pb2.ListKeysRequest(), timeout=TIMEOUT_SECONDS)
    if any(key_state(key, datetime.now(UTC)) == "good" for key in found.keys):
        return ""
    request = key_service_pb2.CreateKeyRequest(description=DESCRIPTION, scopes=scopes_of(KeyRole.ADMIN))
    return str((await stub.CreateKey(request, timeout=TIMEOUT_SECONDS)).text)


async def _first_token(channel: grpc.aio.Channel) -> str:
    """Returns the text of a new join token; empty where one is valid already."""
    stub = cast("Any", join_token_service_pb2_grpc.JoinTokenServiceStub(channel))
    pb = join_token_service_pb2
    found, now = await stub.ListJoinTokens(pb.ListJoinTokensRequest(), timeout=TIMEOUT_SECONDS), datetime.now(UTC)
    if any(
        not token.HasField("expire_time") or token.expire_time.ToDatetime(tzinfo=UTC) > now
        for token in found.join_tokens
    ):
        return ""
    request = pb.CreateJoinTokenRequest(description=DESCRIPTION)
    request.lifetime.FromSeconds(INVITATION_DAYS * SECONDS_OF_DAY)
    return str((await stub.CreateJoinToken(request, timeout=TIMEOUT_SECONDS)).token)


def _kept(file: Path, text: str) -> Path | None:
    """Writes a secret to a file that its owner alone can read; returns it. None for no text."""
    if not text:
        return None
    try:
        replace_file(file, f"{text}\n".encode())
    except OSError as error:
        raise WeftError(Reason.INVALID_ARGUMENT, f"{file} cannot be written: {error.strerror}") from error
    return file
