"""`/v1/admin/process-health`, `/v1/admin/discovered` and `/v1/admin/catalog`."""

from admin_script import ScriptedProcesses, admin_ports
from gateway_script import serving
from kit.keys import Keys

from weft.api.gateway.v1.model_catalog_pb2 import ModelCatalog

HEALTH, DISCOVERED = "/v1/admin/process-health", "/v1/admin/discovered"
HOLDERS = {
    "settings0000": ("settings:edit",),
    "watcher00000": ("telemetry:view",),
    "operator0000": ("operations:view",),
}
KEYS = Keys(HOLDERS)


async def test_process_health_needs_its_own_scope() -> None:
    async with serving(admin=admin_ports(processes=ScriptedProcesses()), keys=KEYS) as gateway:
        assert (await gateway.request("GET", HEALTH, key="watcher00000")).status == 200
        assert (await gateway.request("GET", HEALTH, key="settings0000")).status == 403


async def test_standalone_gateway_suggests_weft_discover() -> None:
    async with serving(admin=admin_ports()) as gateway:
        found = await gateway.request("GET", DISCOVERED)
    assert found.refusal[:2] == (501, "unsupported_operation")
    assert "weft models discover" in found.error["message"]


async def test_catalog_is_asked_for_a_text_or_a_source() -> None:
    asked: list[tuple[str, str]] = []

    async def catalog(text: str, source: str, _: object) -> ModelCatalog:
        asked.append((text, source))
        return ModelCatalog(hub="http://hub.example")

    async with serving(admin=admin_ports(catalog=catalog)) as gateway:
        found = await gateway.request("GET", "/v1/admin/catalog?q=qwen")
        assert (await gateway.request("GET", "/v1/admin/catalog?source=hf:a/b")).status == 200
        assert (await gateway.request("GET", "/v1/admin/catalog?q=qwen&source=hf:a/b")).status == 400
        assert (await gateway.request("GET", f"/v1/admin/catalog?q={'x' * 201}")).status == 400
    assert (found.of(200)["hub"], found.json["models"]) == ("http://hub.example", [])
    assert asked == [("qwen", ""), ("", "hf:a/b")]
