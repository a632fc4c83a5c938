"""A mesh whose extension is off has no trials: no kind, endpoint, command or page, and stored trials do not matter."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from asgi_call import answer_of
from kit.failures import fails
from test_extension_apis import app_with

from gateway.endpoints import gateway_routers, kinds_with, off_paths
from gateway.routing import routes_of
from gateway.watch import watch_handlers
from gateway.watch.resources import resource_sources
from weft.documents.resource_kinds import ResourceKind, listed_kinds
from weft.extension import kinds_off, own_extensions
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.cli import extension_commands
from weft_app.cli.extension_commands import kinds_off_here
from weft_app.cli.targets import scope_of
from weft_app.compose.home import WeftHome
from weft_app.compose.service_configs import registry_config
from weft_app.config.loader import parse_config

WHY = "the kind trial belongs to the extension trials, which is off: extensions.disabled names it"
OTHERS = [each for each in own_extensions() if each.name != "trials"]


def test_registry_of_a_mesh_knows_which_kinds_are_off(tmp_path: Path) -> None:
    off = parse_config({"extensions": {"disabled": ["trials"]}})
    assert registry_config(off, WeftHome(tmp_path)).kinds_off == {"trial": WHY} == kinds_off(["trials"])
    assert registry_config(parse_config({}), WeftHome(tmp_path)).kinds_off == {}


async def test_gateway_has_no_endpoint_schema_or_watch_of_trials() -> None:
    for extensions, status, is_there in ((own_extensions(), 200, True), (OTHERS, 404, False)):
        app = app_with(extensions)
        assert (await answer_of(app, "GET", "/api/v1/trials")).status == status
        assert (await answer_of(app, "GET", "/api/v1/tenants")).status == 200
        document = json.loads(await app.document())
        words = json.dumps(document).lower()
        assert ("/api/v1/trials/{name}" in document["paths"]) is is_there
        paths = {route.path for route in routes_of(gateway_routers(extensions))}
        assert ({"/v1/trials/{name}", "/api/v1/trials/{name}"} <= paths) is is_there
        assert any("trials" in path for path in paths) is is_there
        assert ("trialdocument" in words) is is_there
        assert ('"trial"' in words) is is_there
        registry: Any = None
        sources = {each.kind for each in resource_sources(registry, kinds_with(extensions))}
        assert ("trial" in sources) is is_there
        assert "tenant" in sources


async def test_callers_that_know_the_kind_are_told_or_watch_the_others() -> None:
    """`weft get all -w` outside the mesh's folder asks for all kinds that it knows, and failed."""
    app = app_with(OTHERS)
    app.off_paths = off_paths(["trials"])
    assert b"the extension trials is off" in (await answer_of(app, "GET", "/api/v1/trials")).body
    sources: Any = {"model": "models", "tenant": "tenants"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch_handlers, "_refusal", lambda *_: None)
        wanted: Any = watch_handlers._wanted
        assert wanted(sources, "model,trial", None) == ["models"]
        for words in ("trial", "model,nonsense"):
            with pytest.raises(WeftError, match="is not a kind"):
                wanted(sources, words, None)


@pytest.fixture
def off_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder whose weft.yaml disables the extension."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weft.yaml").write_text("extensions: {disabled: [trials]}\n")
    for each in (extension_commands.extension_commands, extension_commands._disabled_here):
        each.cache_clear()
    yield
    for each in (extension_commands.extension_commands, extension_commands._disabled_here):
        each.cache_clear()


@pytest.mark.usefixtures("off_here")
def test_commands_know_no_trials() -> None:
    mesh: Any = None
    for words in (["trials"], ["trial/t"], ["trial", "t"], ["models,trials"]):
        with fails(Reason.INVALID_ARGUMENT, WHY):
            scope_of(mesh, words)
    kinds = scope_of(mesh, ["all"]).kinds
    assert ResourceKind.TRIAL not in kinds
    assert ResourceKind.TENANT in kinds
    assert "trials" not in listed_kinds(plural=True, off=kinds_off_here())
    assert "belongs to the extension trials" in extension_commands.off_command("models trial")
