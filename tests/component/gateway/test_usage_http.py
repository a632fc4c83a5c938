"""`/v1/usage` shows a tenant its own usage, `/v1/admin/usage` that of all tenants, and `weft mesh usage` prints it."""

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import pytest
from gateway_script import FixedFleet, model, serving
from kit.keys import Keys, bearer

from weft.api.registry.v1.model_pb2 import ModelPrice
from weft.api.router.v1 import usage_pb2
from weft.api.router.v1 import usage_service_pb2 as pb
from weft.documents.codec import document_of
from weft.durable.usage import GROUPS, UsageClient, moment_of
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.time.timestamps import datetime_of
from weft_app.cli.usage import csv_text, table_text

KEYS = Keys({"ann000000000": ("inference:view",), "admin0000000": ("telemetry:view",)}, tenants={"admin0000000": "ops"})
NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)


@dataclass
class ScriptedUsage(UsageClient):
    """Answers always the same; records what is asked for."""

    asked: list[pb.ListUsageRequest] = field(default_factory=list)

    async def usage(self, wanted: pb.ListUsageRequest) -> pb.ListUsageResponse:
        self.asked.append(wanted)
        return found()


def found() -> pb.ListUsageResponse:
    known = usage_pb2.UsageCounts(completed_count=2, prompt_tokens=30, completion_tokens=7)
    known.gpu_time.FromMilliseconds(1_500)
    unknown = usage_pb2.UsageCounts(failed_count=1, unknown_tokens_count=1, unknown_gpu_count=1)
    rows = [usage_pb2.UsageRow(tenant="ann", counts=known), usage_pb2.UsageRow(tenant="=cmd()", counts=unknown)]
    total = usage_pb2.UsageCounts()
    total.MergeFrom(known)
    total.failed_count, total.unknown_tokens_count, total.unknown_gpu_count = 1, 1, 1
    return pb.ListUsageResponse(rows=rows, total=total)


async def test_tenant_sees_its_own_usage_and_an_admin_sees_all() -> None:
    source = ScriptedUsage()
    async with serving(usage_source=source, keys=KEYS) as gateway:
        body = await gateway.read("/v1/usage?by=key,day&since=30d&model=tiny&limit=5", bearer("ann000000000"))
        assert (body["kind"], len(body["items"])) == ("UsageList", 2)
        assert source.asked[0].tenant == "ann"
        assert list(source.asked[0].by) == [GROUPS["key"], GROUPS["day"]]
        assert source.asked[0].HasField("since")
        assert not source.asked[0].HasField("until")
        for path, key, status in (
            ("usage?tenant=bob", "ann000000000", 400),
            ("admin/usage", "ann000000000", 403),
            ("admin/usage?tenant=bob", "admin0000000", 200),
            ("admin/usage", "admin0000000", 200),
        ):
            assert (await gateway.request("GET", f"/v1/{path}", key=key)).status == status
        assert [wanted.tenant for wanted in source.asked[1:]] == ["bob", ""]


CLOUD = replace(model("cloud"), remote=True, price=ModelPrice(prompt_dollars=1.0, completion_dollars=10.0))
DEAR = replace(model("dear"), remote=True, price=ModelPrice(prompt_dollars=2.0, completion_dollars=20.0))


@pytest.mark.parametrize(
    ("query", "reference", "saved"), [("", "cloud", 100_000), ("?compareWith=dear", "dear", 200_000)]
)
async def test_savings_are_the_price_of_local_tokens_at_a_remote_model(query: str, reference: str, saved: int) -> None:
    async with serving(usage_source=ScriptedUsage(), fleet=FixedFleet.of(model("tiny"), CLOUD, DEAR)) as gateway:
        body = await gateway.read(f"/v1/admin/usage{query}")
    assert (body["comparedWith"], body["savedNanodollars"]) == (reference, saved)
    assert [row["savedNanodollars"] for row in body["items"]] == [saved, 0]
    lines = [line.split() for line in table_text(body, ["tenant"]).splitlines()]
    assert [line[-1] for line in lines] == ["SAVED", f"${saved / 1e9:.5f}", "$0.00", f"${saved / 1e9:.5f}"]


async def test_model_without_a_known_price_cannot_be_compared_with() -> None:
    async with serving(usage_source=ScriptedUsage(), fleet=FixedFleet.of(model("tiny"), CLOUD)) as gateway:
        answer = await gateway.request("GET", "/v1/usage?compareWith=tiny")
        body = await gateway.read("/v1/usage")
    assert answer.refusal[::2] == (400, "compareWith")
    assert body["comparedWith"] == "cloud"


async def test_invalid_parameter_is_reported() -> None:
    async with serving(usage_source=ScriptedUsage(), keys=KEYS) as gateway:
        for query in ("by=colour", "by=day,day", "since=soon", "until=2026-13-01", "limit=0", "order=asc"):
            answer = await gateway.request("GET", f"/v1/admin/usage?{query}", key="admin0000000")
            assert answer.refusal[::2] == (400, query.partition("=")[0])


def test_time_is_a_relative_duration_or_a_utc_date() -> None:
    for text, expected in {
        "90m": "2026-11-22T10:30:00+00:00",
        "30d": "2026-10-23T12:00:00+00:00",
        "2026-11-01": "2026-11-01T00:00:00+00:00",
        "2026-11-01T12:00+02:00": "2026-11-01T10:00:00+00:00",
    }.items():
        assert datetime_of(moment_of(text, "since", NOW)).isoformat() == expected
    for wrong in ("", "30", "-3d", "0001-01-01T00:00+23:00", "tomorrow"):
        with pytest.raises(WeftError, match="since: must be"):
            moment_of(wrong, "since", NOW)


def test_table_marks_unknown_values_and_ends_with_the_total() -> None:
    lines = [line.split() for line in table_text(document_of(found()), ["tenant"]).splitlines()]
    assert lines[1] == ["ann", "2", "2", "0", "0", "0", "30", "0", "7", "1.5", "0"]
    assert lines[2][-4:] == ["-", "(+1", "unknown)", "0"]
    assert lines[3][:3] == ["total", "3", "2"]


def test_csv_uses_api_field_names_and_escapes_formulas() -> None:
    header, ann, cmd = csv_text(document_of(found()), ["tenant"]).splitlines()
    assert header.split(",")[:3] == ["tenant", "completed_count", "failed_count"]
    cells = dict(zip(header.split(","), ann.split(","), strict=True))
    assert (cells["prompt_tokens"], cells["gpu_seconds"]) == ("30", "1.5")
    assert cmd.startswith("'=cmd(),0,1,")
    assert dict(zip(header.split(","), cmd.split(","), strict=True))["gpu_seconds"] == ""
