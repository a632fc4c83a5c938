"""`/v1/admin/captures`: captured prompts and answers, and whom the audit log gets."""

from dataclasses import dataclass, field

from gateway_script import serving
from kit.keys import Keys

from weft.api.registry.v1 import capture_service_pb2 as pb

KEYS = Keys({"admin0000000": ("*:*",)}, "ops")
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


async def test_operator_reads_a_capture_of_any_tenant_by_its_id() -> None:
    """It was 404 "not stored" without `allTenants`, although it was stored."""
    port = ScriptedCaptures()
    async with serving(captures=port) as gateway:
        assert (await gateway.request("GET", PATH)).status == 200
        assert (await gateway.request("GET", PATH, headers={"X-Tenant-ID": "acme"})).status == 200
    assert [tenant for _, tenant, _ in port.asked] == ["", "acme"]
