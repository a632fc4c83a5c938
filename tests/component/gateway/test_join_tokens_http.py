"""`/v1/admin/join-tokens`: by scope, the token once, and the command that is typed on the other machine."""

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from gateway_script import serving
from kit.keys import Keys

from weft.api.registry.v1 import join_token_service_pb2 as pb
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.compose.invitation import JoinCommand

PATH = "/v1/admin/join-tokens"
TOKEN = "wjt_3k9x0a7bq2mz_secret"
HOLDERS = {
    "viewer000000": ("runners:view",),
    "maker0000000": ("runners:create",),
    "editor000000": ("runners:edit",),
    "user00000000": ("inference:create", "models:edit", "operations:create"),
}
KEYS = Keys(HOLDERS)


@dataclass
class ScriptedTokens:
    """The registry's JoinTokenService; records its calls in `asked`."""

    asked: list[Any] = field(default_factory=list)

    async def ListJoinTokens(self, request: pb.ListJoinTokensRequest, *, timeout: float) -> pb.ListJoinTokensResponse:  # noqa: N802 - the name of the rpc
        return pb.ListJoinTokensResponse(join_tokens=[_token()])

    async def CreateJoinToken(  # noqa: N802 - the name of the rpc
        self, request: pb.CreateJoinTokenRequest, *, timeout: float
    ) -> pb.CreateJoinTokenResponse:
        lifetime = request.lifetime.ToSeconds() if request.HasField("lifetime") else None
        limits = (request.name_pattern, request.pool, request.reusable)
        self.asked.append(("create", request.description, lifetime, *limits))
        return pb.CreateJoinTokenResponse(join_token=_token(), token=TOKEN)

    async def RevokeJoinToken(  # noqa: N802 - the name of the rpc
        self, request: pb.RevokeJoinTokenRequest, *, timeout: float
    ) -> pb.RevokeJoinTokenResponse:
        self.asked.append(("revoke", request.id))
        if request.id == "nobody":
            raise WeftError(Reason.NOT_FOUND, "there is no join token with this id")
        return pb.RevokeJoinTokenResponse()


def _token() -> pb.JoinToken:
    token = pb.JoinToken(id="3k9x0a7bq2mz", description="Ann's laptop")
    token.create_time.FromDatetime(datetime(2026, 1, 1, tzinfo=UTC))
    return token


def joins(token: str) -> JoinCommand:
    return JoinCommand(text=f"weft runner join weft://{token}@box:7443/sha256:00")


async def test_new_token_comes_with_its_join_command_and_is_not_stored() -> None:
    tokens = ScriptedTokens()
    async with serving(join_tokens=tokens, join_command=joins) as gateway:
        body = b'{"description": "Ann\'s laptop", "lifetimeSeconds": 86400, "namePattern": "ann-*", "pool": "qwen"}'
        raw = await gateway.request("POST", PATH, body)
        listed = await gateway.read(PATH)
    assert (raw.status, raw.headers["cache-control"]) == (201, "no-store")
    assert raw.json == {
        "kind": "joinToken",
        "id": "3k9x0a7bq2mz",
        "description": "Ann's laptop",
        "createTime": "2026-01-01T00:00:00Z",
        "type": "token",
        "reusable": False,
        "names": [],
        "token": TOKEN,
        "command": f"weft runner join weft://{TOKEN}@box:7443/sha256:00",
        "thisMachineOnly": False,
    }
    assert tokens.asked == [("create", "Ann's laptop", 86_400, "ann-*", "qwen", False)]
    assert [each["id"] for each in listed["items"]] == ["3k9x0a7bq2mz"]
    assert TOKEN not in json.dumps(listed)


async def test_token_creation_fails_with_a_fix_if_runners_cannot_join() -> None:
    tokens = ScriptedTokens()
    async with serving(join_tokens=tokens) as gateway:
        found = await gateway.request("POST", PATH)
    assert found.refusal[:2] == (501, "unsupported_operation")
    assert "weft up --host 0.0.0.0" in found.error["message"]
    assert tokens.asked == []


async def test_token_is_revoked_by_id() -> None:
    tokens = ScriptedTokens()
    async with serving(join_tokens=tokens, join_command=joins) as gateway:
        assert (await gateway.request("DELETE", f"{PATH}/3k9x0a7bq2mz")).status == 204
        assert (await gateway.request("DELETE", f"{PATH}/nobody")).status == 404
    assert tokens.asked == [("revoke", "3k9x0a7bq2mz"), ("revoke", "nobody")]


async def test_each_call_requires_its_own_scope() -> None:
    async with serving(join_tokens=ScriptedTokens(), join_command=joins, keys=KEYS) as gateway:
        for key, statuses in (
            ("viewer000000", (200, 403, 403)),
            ("maker0000000", (200, 201, 403)),
            ("editor000000", (200, 403, 204)),
            ("user00000000", (403, 403, 403)),
        ):
            calls = (("GET", PATH), ("POST", PATH), ("DELETE", f"{PATH}/3k9x0a7bq2mz"))
            found = [(await gateway.request(method, path, key=key)).status for method, path in calls]
            assert tuple(found) == statuses
