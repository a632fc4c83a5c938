"""GET and PUT /api/v1/config."""

from gateway_script import serving
from registry_script import ScriptedRegistry

from weft.api.registry.v1.settings_pb2 import MeshSettings
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

PATH = "/api/v1/config"
JSON = {"content-type": "application/json"}


async def test_settings_are_read_and_updated() -> None:
    registry = ScriptedRegistry()
    async with serving(registry=registry) as gateway:
        assert await gateway.read(PATH) == {"allowCloudFallback": True}
        for allowed in (False, True):
            put = await gateway.request("PUT", PATH, {"allowCloudFallback": allowed}, headers=JSON)
            assert put.of(200) == {"allowCloudFallback": allowed}
            assert await gateway.read(PATH) == {"allowCloudFallback": allowed}
    assert ("update settings", MeshSettings(allow_cloud_fallback=False)) in registry.asked


async def test_journal_setting_is_shown_once_set_and_kept_if_omitted() -> None:
    async with serving(registry=ScriptedRegistry()) as gateway:
        put = await gateway.request("PUT", PATH, b'{"allowCloudFallback": true, "journal": "wait"}', headers=JSON)
        assert put.of(200) == {"allowCloudFallback": True, "journal": "wait"}
        again = await gateway.request("PUT", PATH, b'{"allowCloudFallback": true}', headers=JSON)
        assert again.of(200) == {"allowCloudFallback": True, "journal": "wait"}


async def test_failed_update_is_not_reported_as_set() -> None:
    registry = ScriptedRegistry(failure=WeftError(Reason.SERVICE_UNAVAILABLE, "the registry is away"))
    async with serving(registry=registry) as gateway:
        sent = await gateway.request("PUT", PATH, b'{"allowCloudFallback": false}', headers=JSON)
        assert sent.refusal[:2] == (503, "service_unavailable")
    assert registry.allow_cloud_fallback
