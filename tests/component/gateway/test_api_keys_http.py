"""`/api/v1/keys`: only for callers with a key, and never beyond their own access."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest
import structlog
from gateway_script import serving
from google.protobuf.duration_pb2 import Duration
from kit.keys import Keys, ring_of, verifier

from weft.api.common.v1.priority_pb2 import PRIORITY_CEILING_LOW, PRIORITY_CEILING_NORMAL
from weft.api.registry.v1 import key_service_pb2 as pb
from weft.kernel.access.principal import key_text
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority

PATH = "/api/v1/keys"
NEW_SECRET = "7" * 64
NOW = datetime(2026, 1, 1, tzinfo=UTC)
HOLDERS = {
    "viewer000000": ("keys:view",),
    "maker0000000": ("keys:create", "models:view"),
    "editor000000": ("keys:edit", "models:view"),
    "clerk0000000": ("keys:*", "models:view"),
    "admin0000000": ("*:*",),
    "user00000000": ("inference:create",),
}
KEYS = Keys(HOLDERS, "ops")


def known(key_id: str = "abc000000000", *scopes: str) -> pb.Key:
    key = pb.Key(id=key_id, tenant="team-a", scopes=scopes or ("models:view",))
    key.create_time.FromDatetime(NOW)
    return key


@dataclass
class ScriptedKeys:
    """The registry's KeyService; records its calls in `asked`."""

    keys: dict[str, pb.Key] = field(default_factory=lambda: {"abc000000000": known()})
    asked: list[Any] = field(default_factory=list)

    async def ListKeys(self, request: pb.ListKeysRequest, *, timeout: float) -> pb.ListKeysResponse:  # noqa: N802 - the name of the rpc
        return pb.ListKeysResponse(keys=self.keys.values())

    async def CreateKey(self, request: pb.CreateKeyRequest, *, timeout: float) -> pb.CreateKeyResponse:  # noqa: N802 - the name of the rpc
        self.asked.append(request)
        return pb.CreateKeyResponse(key=known("new000000000"), text=key_text("new000000000", NEW_SECRET))

    async def RevokeKey(self, request: pb.RevokeKeyRequest, *, timeout: float) -> pb.RevokeKeyResponse:  # noqa: N802 - the name of the rpc
        self.asked.append(("revoke", request.id))
        if request.id not in self.keys:
            raise WeftError(Reason.NOT_FOUND, "there is no key with this id")
        return pb.RevokeKeyResponse()

    async def RotateKey(self, request: pb.RotateKeyRequest, *, timeout: float) -> pb.RotateKeyResponse:  # noqa: N802 - the name of the rpc
        grace = request.grace.ToSeconds() if request.HasField("grace") else None
        self.asked.append(("rotate", request.id, grace))
        rotated = pb.RotateKeyResponse(key=self.keys[request.id], text=key_text(request.id, NEW_SECRET))
        rotated.old_expire_time.FromDatetime(NOW)
        return rotated


async def test_new_key_has_at_most_the_highest_priority_of_its_creator() -> None:
    keys = ScriptedKeys()
    keys.keys["high00000000"] = known("high00000000")
    limited = verifier("maker0000000", ["keys:create", "keys:edit", "models:view"], max_priority=Priority.NORMAL)
    async with serving(keys=Keys(ring_of(limited)), api_keys=keys) as gateway:
        wish: dict[str, object] = {"scopes": ["models:view"]}
        for wanted in ({"maxPriority": "low"}, {}):
            made = await gateway.request("POST", PATH, wish | wanted, key="maker0000000")
            assert made.status == 201
        refused = await gateway.request("POST", PATH, wish | {"maxPriority": "high"}, key="maker0000000")
        rotated = await gateway.request("POST", f"{PATH}/high00000000/rotate", {}, key="maker0000000")
    assert [each.max_priority for each in keys.asked] == [PRIORITY_CEILING_LOW, PRIORITY_CEILING_NORMAL]
    for answer in (refused, rotated):
        assert answer.status == 403
        assert answer.error["message"] == "max_priority: the caller's key allows at most normal"


@pytest.mark.parametrize(("method", "path"), [("POST", PATH), ("DELETE", f"{PATH}/abc000000000")])
async def test_keys_cannot_be_changed_over_http_if_auth_is_disabled(method: str, path: str) -> None:
    keys = ScriptedKeys()
    async with serving(api_keys=keys) as gateway:
        assert (await gateway.request(method, path)).status == 404
    assert keys.asked == []


async def test_keys_are_listed_also_if_auth_is_disabled() -> None:
    async with serving(api_keys=ScriptedKeys()) as gateway:
        listed = (await gateway.request("GET", PATH)).json
    assert [key["id"] for key in listed["items"]] == ["abc000000000"]


async def test_keys_are_listed_without_secrets() -> None:
    async with serving(keys=KEYS, api_keys=ScriptedKeys()) as gateway:
        answer = await gateway.request("GET", PATH, key="viewer000000")
    assert answer.status == 200
    assert answer.json == {
        "kind": "ApiKeyList",
        "items": [
            {
                "kind": "apiKey",
                "id": "abc000000000",
                "state": "good",
                "tenant": "team-a",
                "scopes": ["models:view"],
                "description": "",
                "createTime": "2026-01-01T00:00:00Z",
            }
        ],
    }


async def test_new_key_is_returned_once_uncacheable_and_never_logged() -> None:
    keys = ScriptedKeys()
    wish = {"description": "notebook", "tenant": "team-a", "scopes": ["models:view"], "lifetimeSeconds": 3600}
    with structlog.testing.capture_logs() as lines:
        async with serving(keys=KEYS, api_keys=keys) as gateway:
            answer = await gateway.request("POST", PATH, wish, key="maker0000000")
    assert answer.status == 201
    assert answer.json["key"] == key_text("new000000000", NEW_SECRET)
    assert answer.headers["cache-control"] == "no-store"
    assert keys.asked == [
        pb.CreateKeyRequest(
            description="notebook", tenant="team-a", scopes=("models:view",), lifetime=Duration(seconds=3600)
        )
    ]
    assert NEW_SECRET not in str(lines)
    (line,) = [line for line in lines if line["event"] == "key made"]
    assert (line["id"], line["by"]) == ("new000000000", "key:maker0000000")


async def test_key_is_revoked_and_rotated_with_and_without_a_grace_period() -> None:
    keys = ScriptedKeys()
    async with serving(keys=KEYS, api_keys=keys) as gateway:
        answer = await gateway.request("DELETE", f"{PATH}/abc000000000", key="editor000000")
        assert (answer.status, answer.body) == (204, b"")
        for holder, body, grace in (("admin0000000", None, None), ("admin0000000", {"graceSeconds": 0}, 0)):
            answer = await gateway.request("POST", f"{PATH}/abc000000000/rotate", body, key=holder)
            assert answer.status == 200
            assert answer.json["key"] == key_text("abc000000000", NEW_SECRET)
            assert answer.json["oldExpireTime"] == "2026-01-01T00:00:00Z"
            assert keys.asked[-1] == ("rotate", "abc000000000", grace)
        answer = await gateway.request("DELETE", f"{PATH}/nobody000000", key="editor000000")
        assert (answer.status, answer.error["code"]) == (404, "not_found")


async def test_key_cannot_exceed_or_grant_more_than_its_own_scopes() -> None:
    keys = ScriptedKeys(keys={"abc000000000": known(), "strong000000": known("strong000000", "models:*")})
    async with serving(keys=KEYS, api_keys=keys) as gateway:
        for holder, method, path, body, scope in (
            ("user00000000", "GET", PATH, None, "keys:view"),
            ("viewer000000", "POST", PATH, {"scopes": ["keys:view"]}, "keys:create"),
            ("viewer000000", "DELETE", f"{PATH}/abc000000000", None, "keys:edit"),
            ("maker0000000", "POST", f"{PATH}/abc000000000/rotate", None, "keys:edit"),
            ("editor000000", "POST", f"{PATH}/abc000000000/rotate", None, "keys:create"),
            ("maker0000000", "POST", PATH, {"scopes": ["models:edit"]}, "models:edit"),
            ("maker0000000", "POST", PATH, {"scopes": ["models:view", "*:*"]}, "inference:create"),
            ("maker0000000", "POST", PATH, {}, "inference:create"),
            ("maker0000000", "POST", PATH, None, "inference:create"),
            ("admin0000000", "POST", PATH, {"scopes": ["mesh:create"]}, "mesh:create"),
            ("clerk0000000", "POST", f"{PATH}/strong000000/rotate", None, "models:create"),
        ):
            answer = await gateway.request(method, path, body, key=holder)
            assert answer.refusal[:2] == (403, "permission_denied")
            assert scope in answer.error["message"]
    assert keys.asked == []


async def test_invalid_field_is_rejected_by_name() -> None:
    keys = ScriptedKeys()
    async with serving(keys=KEYS, api_keys=keys) as gateway:
        for path, body, param in (
            (PATH, {"description": "x" * 129}, "description"),
            (PATH, {"tenant": "x" * 65}, "tenant"),
            (PATH, {"scopes": "models:view"}, "scopes"),
            (PATH, {"scopes": ["models:view"] * 33}, "scopes"),
            (PATH, {"scopes": ["nonsense"]}, "scopes[0]"),
            (PATH, {"scopes": [7]}, "scopes[0]"),
            (PATH, {"lifetimeSeconds": 59}, "lifetimeSeconds"),
            (PATH, {"lifetimeSeconds": "60"}, "lifetimeSeconds"),
            (PATH, {"expires": "90d"}, "expires"),
            (f"{PATH}/abc000000000/rotate", {"graceSeconds": -1}, "graceSeconds"),
            (f"{PATH}/abc000000000/rotate", {"graceSeconds": 30 * 86_400 + 1}, "graceSeconds"),
            (f"{PATH}/a%20b/rotate", {}, "id"),
            (f"{PATH}?dryRun=1", {"scopes": ["models:view"]}, "dryRun"),
        ):
            answer = await gateway.request("POST", path, body, key="admin0000000")
            assert answer.refusal[::2] == (400, param)
    assert keys.asked == []
