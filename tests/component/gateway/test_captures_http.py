"""`/v1/admin/captures`: who reads captured prompts and answers, and whom the audit log gets."""

from dataclasses import dataclass, field

import pytest
from gateway_script import serving
from kit.keys import Keys

from weft.api.registry.v1 import capture_service_pb2 as pb

KEYS = Keys(
    {
        "viewer000000": ("*:view",),
        "operator0000": ("inference:*", "models:*", "settings:*", "operations:*", "telemetry:*"),
        "admin0000000": ("*:*",),
    },
    "ops",
)
PATH = "/v1/admin/captures/req/1"


@dataclass
class ScriptedCaptures:
    """The registry's CaptureService; records its calls."""

    asked: list[tuple[str, str, str]] = field(default_factory=list)

    async def GetCapture(self, request: pb.GetCaptureRequest, *, timeout: float) -> pb.GetCaptureResponse:  # noqa: N802 - the name of the rpc
        self.asked.append((request.request_id, request.tenant, request.requested_by))
        capture = pb.Capture(
            request_id=request.request_id, tenant="ops", prompt="[user]\nHi", answer="<b>", answer_cut=True
        )
        return pb.GetCaptureResponse(capture=capture)


@pytest.mark.parametrize("holder", ["viewer000000", "operator0000"])
async def test_only_an_admin_reads_captures_even_if_an_operator_enables_them(holder: str) -> None:
    port = ScriptedCaptures()
    async with serving(keys=KEYS, captures=port) as gateway:
        assert (await gateway.request("GET", PATH, key=holder)).status == 403
    assert port.asked == []


async def test_capture_is_read_for_the_tenant_of_the_key_by_name_and_never_cached() -> None:
    port = ScriptedCaptures()
    async with serving(keys=KEYS, captures=port) as gateway:
        answer = await gateway.request("GET", f"{PATH}?allTenants=true", key="admin0000000")
    assert answer.status == 200
    assert answer.headers["cache-control"] == "no-store"
    assert port.asked == [("req/1", "ops", "key:admin0000000")]
    found = answer.json
    assert (found["prompt"], found["answer"], found["promptCut"], found["answerCut"]) == (
        "[user]\nHi",
        "<b>",
        False,
        True,
    )
