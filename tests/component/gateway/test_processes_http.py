"""`/v1/admin/process-health`, `/v1/admin/log-level` and `/v1/admin/discovered`."""

import json
from typing import Any

import pytest
from admin_script import ScriptedProcesses, admin_ports
from gateway_script import RunningGateway, serving
from key_script import Keys, bearer

from weft.api.gateway.v1.discovery_pb2 import Discovery
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

LEVEL, HEALTH, DISCOVERED = "/v1/admin/log-level", "/v1/admin/process-health", "/v1/admin/discovered"
HOLDERS = {
    "settings0000": ("settings:edit",),
    "watcher00000": ("telemetry:view",),
    "operator0000": ("operations:view",),
}
KEYS = Keys(HOLDERS)


async def ask(gateway: RunningGateway, method: str, path: str, body: Any = None, key: str = "") -> tuple[int, Any]:
    answer = await gateway.request(method, path, b"" if body is None else json.dumps(body).encode(), bearer(key))
    return answer.status, json.loads(answer.body)


async def test_log_level_is_changed_temporarily_and_the_response_has_its_expiry() -> None:
    processes = ScriptedProcesses()
    async with serving(admin=admin_ports(processes=processes)) as gateway:
        body = {"process": "runner/laptop", "level": "debug", "seconds": 300}
        found = await ask(gateway, "PUT", LEVEL, body)
        reset = await ask(gateway, "PUT", LEVEL, {"level": "reset"})
    assert found == (
        200,
        {
            "kind": "ProcessLogLevel",
            "process": "runner/laptop",
            "level": "debug",
            "previousLevel": "info",
            "endTime": "2026-11-22T14:53:15Z",
        },
    )
    assert (reset[0], reset[1]["process"], "endTime" in reset[1]) == (200, "mesh", False)
    assert processes.asked == ["runner/laptop", "mesh"]
    assert [(each.level, each.duration.ToSeconds()) for each in processes.levels] == [("debug", 300), ("", 0)]


async def test_process_health_has_components_and_log_level() -> None:
    processes = ScriptedProcesses()
    async with serving(admin=admin_ports(processes=processes)) as gateway:
        status, found = await ask(gateway, "GET", f"{HEALTH}?process=runner/laptop")
    assert (status, found["status"], found["logLevel"], found["process"]) == (200, "degraded", "info", "runner/laptop")
    assert found["components"] == [
        {"name": "engines", "state": "degraded", "reason": "engine_failed", "message": "qwen failed"}
    ]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"level": "loud"}, "level"),
        ({"level": "debug", "seconds": 14_401}, "seconds"),
        ({"level": "debug", "process": "nobody"}, "process"),
        ({"level": "debug", "process": "runner/a b"}, "process"),
        ({}, "level"),
    ],
)
async def test_invalid_level_or_process_is_reported(body: Any, param: str) -> None:
    processes = ScriptedProcesses()
    async with serving(admin=admin_ports(processes=processes)) as gateway:
        status, found = await ask(gateway, "PUT", LEVEL, body)
    assert (status, found["error"]["param"]) == (400, param)
    assert processes.asked == []


async def test_unknown_process_is_an_error() -> None:
    gone = ScriptedProcesses(failure=WeftError(Reason.NO_RUNNER_AVAILABLE, "the runner laptop is not there"))
    async with serving(admin=admin_ports(processes=gone)) as gateway:
        status, found = await ask(gateway, "GET", f"{HEALTH}?process=runner/laptop")
    assert (status, found["error"]["code"]) == (503, "no_runner_available")


async def test_change_is_attributed_to_the_calling_key() -> None:
    processes = ScriptedProcesses()
    async with serving(admin=admin_ports(processes=processes), keys=KEYS) as gateway:
        assert (await ask(gateway, "PUT", LEVEL, {"level": "debug"}, "settings0000"))[0] == 200
        assert (await ask(gateway, "PUT", LEVEL, {"level": "debug"}, "watcher00000"))[0] == 403
        assert (await ask(gateway, "GET", HEALTH, key="watcher00000"))[0] == 200
        assert (await ask(gateway, "GET", HEALTH, key="settings0000"))[0] == 403
    assert [each.requested_by for each in processes.levels] == ["key:settings0000"]


async def test_discovered_servers_are_listed_with_their_sources() -> None:
    async def found() -> Discovery:
        listed = Discovery(files_left_out=2)
        listed.servers.add(program="ollama", title="Ollama 0.9", source="http://127.0.0.1:11434", models=["a"])
        file = listed.files.add(name="smol", source="ollama:smollm2:135m", served=True)
        file.file.source, file.file.size_bytes = file.source, 7
        return listed

    async with serving(admin=admin_ports(discovery=found), keys=KEYS) as gateway:
        status, body = await ask(gateway, "GET", DISCOVERED, key="operator0000")
        refused = await ask(gateway, "GET", DISCOVERED, key="watcher00000")
    assert (status, refused[0]) == (200, 403)
    assert (body["kind"], body["filesLeftOut"]) == ("Discovery", 2)
    assert body["servers"] == [
        {
            "program": "ollama",
            "title": "Ollama 0.9",
            "source": "http://127.0.0.1:11434",
            "models": ["a"],
            "served": False,
        }
    ]
    assert [(each["source"], each["served"]) for each in body["files"]] == [("ollama:smollm2:135m", True)]


async def test_standalone_gateway_suggests_weft_discover() -> None:
    async with serving(admin=admin_ports()) as gateway:
        status, found = await ask(gateway, "GET", DISCOVERED)
    assert (status, found["error"]["code"]) == (501, "unsupported_operation")
    assert "weft models discover" in found["error"]["message"]
