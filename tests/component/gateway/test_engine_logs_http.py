"""`GET /v1/admin/models/{name}/logs`: the output of a model's engine."""

import json
from dataclasses import replace
from typing import Any

import pytest
from admin_script import ScriptedEngineLogs, admin_ports, two_replicas
from gateway_script import FixedFleet, RawResponse, model, serving

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

FLEET = FixedFleet(replace(two_replicas(), models={**two_replicas().models, "solo": model("solo")}))


async def get(path: str, logs: ScriptedEngineLogs | None = None, **given: Any) -> RawResponse:
    async with serving(fleet=FLEET, admin=admin_ports(engine_logs=logs or ScriptedEngineLogs())) as gateway:
        return await gateway.request("GET", path, **given)


def events_of(response: RawResponse) -> list[Any]:
    return [json.loads(line[6:]) for line in response.body.decode().splitlines() if line.startswith("data: ")]


async def test_last_lines_are_returned_as_one_response() -> None:
    logs = ScriptedEngineLogs()
    found = await get("/v1/admin/models/qwen/logs?lines=50", logs)
    assert found.of(200) == {
        "kind": "EngineLog",
        "model": "qwen",
        "runner": "r1",
        "lines": ["one", "two", "three"],
    }
    assert logs.asked == [("qwen", 50, False)]


async def test_followed_lines_are_sent_as_events() -> None:
    logs = ScriptedEngineLogs()
    found = await get("/v1/admin/models/solo/logs?follow=1", logs)
    assert found.headers["content-type"].startswith("text/event-stream")
    assert [event["lines"] for event in events_of(found)] == [["one", "two"], ["three"]]
    assert logs.asked == [("solo", 200, True)]


@pytest.mark.parametrize("follow", ["", "?follow=1"])
async def test_missing_runner_returns_an_error_status(follow: str) -> None:
    gone = ScriptedEngineLogs(failure=WeftError(Reason.NO_RUNNER_AVAILABLE, "no runner serves qwen now"))
    found = await get(f"/v1/admin/models/qwen/logs{follow}", gone)
    assert (found.status, found.error["code"]) == (503, "no_runner_available")
