"""/v1/admin/operations and /v1/admin/audit."""

import json

from admin_script import ScriptedOperations, admin_ports
from gateway_script import serving

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason


async def test_watch_streams_every_change_and_ends_with_the_operation() -> None:
    async with serving(admin=admin_ports()) as gateway:
        raw = await gateway.request("GET", "/v1/admin/operations/op-1?watch=1")
    assert raw.headers["content-type"].startswith("text/event-stream")
    states = [json.loads(line[6:])["state"] for line in raw.body.decode().splitlines() if line.startswith("data: ")]
    assert states == ["running", "succeeded"]


async def test_cancel_is_attributed_to_the_caller() -> None:
    operations = ScriptedOperations()
    async with serving(admin=admin_ports(operations)) as gateway:
        found = (await gateway.request("DELETE", "/v1/admin/operations/op-1", headers={"X-Tenant-ID": "acme"})).of(200)
    assert found["state"] == "cancelled"
    assert operations.asked == [("cancel", "operations/op-1", "http:acme")]


async def test_audit_read_resumes_from_a_position() -> None:
    operations = ScriptedOperations()
    async with serving(admin=admin_ports(operations)) as gateway:
        found = await gateway.read("/v1/admin/audit?after=7&pageSize=10")
    assert found == {"kind": "AuditList", "items": [], "headSequence": 0, "headHash": ""}
    assert operations.asked == [("audit", 7, 10)]


async def test_audit_read_accepts_position_zero() -> None:
    operations = ScriptedOperations()
    async with serving(admin=admin_ports(operations)) as gateway:
        await gateway.read("/v1/admin/audit?after=0")
    assert operations.asked == [("audit", 0, 0)]


async def test_lease_release_is_attributed_to_the_caller() -> None:
    operations = ScriptedOperations()
    async with serving(admin=admin_ports(operations)) as gateway:
        found = (await gateway.request("DELETE", "/v1/admin/leases/lease-1", headers={"X-Tenant-ID": "acme"})).of(200)
        foreign = await gateway.request(
            "DELETE", "/v1/admin/leases/lease-1", headers={"Origin": "https://evil.example", "Host": "localhost"}
        )
        operations.failure = WeftError(Reason.RESOURCE_IN_USE, "unload it: weft unload qwen")
        refused = (await gateway.request("DELETE", "/v1/admin/leases/lease-2")).of(409)
    assert (found["leaseId"], found["state"], found["purpose"]) == ("lease-1", "releasing", "training")
    assert operations.asked == [("release_lease", "lease-1", "http:acme")]
    assert foreign.status == 403
    assert "weft unload qwen" in refused["error"]["message"]


async def test_operation_joins_the_trace_of_its_request() -> None:
    operations, span = ScriptedOperations(), "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with serving(admin=admin_ports(operations)) as gateway:
        for headers in ({"traceparent": span}, {"traceparent": "nonsense"}, {}):
            await gateway.request("POST", "/v1/admin/models/tiny/unload", b"{}", headers=headers)
    assert operations.traceparents == [span, "", ""]
