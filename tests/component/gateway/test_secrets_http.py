"""`/v1/admin/secrets`: by scope, and never with a value in an answer."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest
import structlog
from gateway_script import serving
from kit.keys import Keys

from weft.api.registry.v1 import secret_service_pb2 as pb
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

PATH = "/v1/admin/secrets"
VALUE = "sk-canary-0123456789"
NOW = datetime(2026, 1, 1, tzinfo=UTC)
HOLDERS = {
    "viewer000000": ("secrets:view",),
    "maker0000000": ("secrets:create",),
    "editor000000": ("secrets:edit",),
    "admin0000000": ("*:*",),
    "user00000000": ("inference:create", "models:edit"),
}
KEYS = Keys(HOLDERS, "ops")


@dataclass
class ScriptedSecrets:
    """The registry's SecretService; records its calls in `asked`."""

    asked: list[Any] = field(default_factory=list)

    async def ListSecrets(self, request: pb.ListSecretsRequest, *, timeout: float) -> pb.ListSecretsResponse:  # noqa: N802 - the name of the rpc
        return pb.ListSecretsResponse(secrets=[self._secret("provider")])

    async def CreateSecret(self, request: pb.CreateSecretRequest, *, timeout: float) -> pb.CreateSecretResponse:  # noqa: N802 - the name of the rpc
        self.asked.append(("create", request.name, request.value))
        return pb.CreateSecretResponse(secret=self._secret(request.name))

    async def UpdateSecret(self, request: pb.UpdateSecretRequest, *, timeout: float) -> pb.UpdateSecretResponse:  # noqa: N802 - the name of the rpc
        self.asked.append(("update", request.name, request.value))
        return pb.UpdateSecretResponse(secret=self._secret(request.name))

    async def DeleteSecret(self, request: pb.DeleteSecretRequest, *, timeout: float) -> pb.DeleteSecretResponse:  # noqa: N802 - the name of the rpc
        self.asked.append(("delete", request.name, request.force))
        if not request.force:
            raise WeftError(Reason.RESOURCE_IN_USE, "the secret is in use by: frontier")
        return pb.DeleteSecretResponse()

    def _secret(self, name: str) -> pb.Secret:
        secret = pb.Secret(name=name, version=1, used_by=["frontier"])
        secret.create_time.FromDatetime(NOW)
        secret.update_time.FromDatetime(NOW)
        return secret


CALLS: tuple[tuple[str, str, str, object, int], ...] = (
    ("secrets:view", "GET", PATH, None, 200),
    ("secrets:create", "POST", PATH, {"name": "provider", "value": VALUE}, 201),
    ("secrets:edit", "PUT", f"{PATH}/provider", {"value": VALUE}, 200),
    ("secrets:edit", "DELETE", f"{PATH}/provider?force=true", None, 204),
)


@pytest.mark.parametrize(("scope", "method", "path", "body", "status"), CALLS)
async def test_each_call_requires_its_scope(scope: str, method: str, path: str, body: object, status: int) -> None:
    async with serving(keys=KEYS, secrets=ScriptedSecrets()) as gateway:
        for holder, scopes in HOLDERS.items():
            answer = await gateway.request(method, path, body, key=holder)
            may = scope in scopes or scopes == ("*:*",) or (scope == "secrets:view" and "secrets" in scopes[0])
            assert answer.status == (status if may else 403), (holder, answer)


async def test_secret_lifecycle_never_exposes_its_value_in_responses_or_logs() -> None:
    port = ScriptedSecrets()
    said = ""
    with structlog.testing.capture_logs() as logged:
        async with serving(keys=KEYS, secrets=port) as gateway:
            for _, method, path, body, status in CALLS:
                answer = await gateway.request(method, path, body, key="admin0000000")
                assert answer.status == status
                said += answer.body.decode()
            refused = await gateway.request("DELETE", f"{PATH}/provider", key="admin0000000")
    assert refused.refusal[:2] == (409, "resource_in_use")
    assert port.asked == [
        ("create", "provider", VALUE),
        ("update", "provider", VALUE),
        ("delete", "provider", True),
        ("delete", "provider", False),
    ]
    assert '"usedBy":["frontier"]' in said
    assert VALUE not in said
    assert VALUE not in str(logged)
    assert {line["event"] for line in logged} >= {"secret created", "secret updated", "secret deleted"}


async def test_invalid_body_is_rejected_without_being_quoted() -> None:
    port = ScriptedSecrets()
    async with serving(keys=KEYS, secrets=port) as gateway:
        for body in (
            {"name": "provider"},
            {"name": "provider", "value": ""},
            {"name": "provider", "value": [VALUE]},
            {"name": "provider", "value": VALUE * 1_000},
            {"name": VALUE * 10, "value": "x"},
            {"name": "provider", "value": VALUE, "also": VALUE},
        ):
            answer = await gateway.request("POST", PATH, body, key="admin0000000")
            assert answer.status == 400, answer
            assert VALUE not in answer.body.decode()
    assert port.asked == []
