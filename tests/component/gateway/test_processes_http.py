"""`/v1/admin/process-health`, `/v1/admin/log-level`, `/v1/admin/discovered` and `/v1/admin/catalog`."""

import json
from typing import Any

from admin_script import ScriptedProcesses, admin_ports
from gateway_script import RunningGateway, serving
from key_script import Keys, bearer

from weft.api.gateway.v1.model_catalog_pb2 import ModelCatalog

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


async def test_change_is_attributed_to_the_calling_key() -> None:
    processes = ScriptedProcesses()
    async with serving(admin=admin_ports(processes=processes), keys=KEYS) as gateway:
        assert (await ask(gateway, "PUT", LEVEL, {"level": "debug"}, "settings0000"))[0] == 200
        assert (await ask(gateway, "PUT", LEVEL, {"level": "debug"}, "watcher00000"))[0] == 403
        assert (await ask(gateway, "GET", HEALTH, key="watcher00000"))[0] == 200
        assert (await ask(gateway, "GET", HEALTH, key="settings0000"))[0] == 403
    assert [each.requested_by for each in processes.levels] == ["key:settings0000"]


async def test_standalone_gateway_suggests_weft_discover() -> None:
    async with serving(admin=admin_ports()) as gateway:
        status, found = await ask(gateway, "GET", DISCOVERED)
    assert (status, found["error"]["code"]) == (501, "unsupported_operation")
    assert "weft models discover" in found["error"]["message"]


async def test_catalog_is_asked_for_a_text_or_a_source() -> None:
    asked: list[tuple[str, str]] = []

    async def catalog(text: str, source: str, _: object) -> ModelCatalog:
        asked.append((text, source))
        return ModelCatalog(hub="http://hub.example")

    async with serving(admin=admin_ports(catalog=catalog)) as gateway:
        status, found = await ask(gateway, "GET", "/v1/admin/catalog?q=qwen")
        assert (await ask(gateway, "GET", "/v1/admin/catalog?source=hf:a/b"))[0] == 200
        assert (await ask(gateway, "GET", "/v1/admin/catalog?q=qwen&source=hf:a/b"))[0] == 400
        assert (await ask(gateway, "GET", f"/v1/admin/catalog?q={'x' * 201}"))[0] == 400
    assert (status, found["hub"], found["models"]) == (200, "http://hub.example", [])
    assert asked == [("qwen", ""), ("", "hf:a/b")]
