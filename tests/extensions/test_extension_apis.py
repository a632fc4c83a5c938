"""The HTTP APIs of extensions in a gateway: imported at their first request, absent if disabled."""

import asyncio
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from asgi_call import answer_of
from gateway_script import FixedFleet, ScriptedDispatcher, app_of, model
from registry_script import ScriptedRegistry
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from structlog.testing import capture_logs

from gateway.endpoints import off_paths
from gateway.gateway_config import GatewayConfig
from gateway.http_api import HttpApi
from gateway.ports import GatewayPorts
from gateway.routing import ApiRouter, DeferredApi, EdgeApp, routes_of
from weft.extension import ApiHook, Extension, load_hook, own_extensions
from weft.kernel.access.principal import KeyRing

GREETING = ApiRouter("greeting")


@dataclass(frozen=True)
class NoKeys:
    """A gate that admits no caller."""

    ring: KeyRing = field(default_factory=KeyRing)
    is_ready: bool = True


async def greet(_request: Request) -> Response:
    """Greets."""
    return PlainTextResponse("hello")


GREETING.add_get("/greeting", None, greet)
API = HttpApi(router=GREETING)


def extension(place: str = f"{__name__}:API") -> Extension:
    hook = ApiHook(place=place, paths=("/greeting",))
    return Extension(name="greeting", summary="Greets.", docs="docs/extensions.md", apis=(hook,))


def app_with(extensions: Sequence[Extension], keys: NoKeys | None = None) -> EdgeApp:
    ports = GatewayPorts(
        dispatcher=ScriptedDispatcher(),
        fleet=FixedFleet.of(model("tiny")),
        registry=ScriptedRegistry(),
        extensions=extensions,
        keys=keys,
    )
    return app_of(GatewayConfig(), ports)


async def test_an_api_is_served_from_its_first_request_on() -> None:
    app = app_with([extension()])
    assert GREETING not in app.served
    first = await answer_of(app, "GET", "/greeting")
    assert (first.status, first.body) == (200, b"hello")
    assert GREETING in app.served
    assert (await answer_of(app, "GET", "/greeting")).status == 200


async def test_many_first_requests_import_an_api_once() -> None:
    app = app_with([extension()])
    answers = await asyncio.gather(*(answer_of(app, "GET", "/greeting") for _ in range(8)))
    assert [each.status for each in answers] == [200] * 8
    assert app.served.count(GREETING) == 1


async def test_another_method_of_a_deferred_path_is_refused_as_such() -> None:
    assert (await answer_of(app_with([extension()]), "DELETE", "/greeting")).status == 405


async def test_an_api_without_its_extension_is_not_found_and_not_documented() -> None:
    app = app_with([])
    assert (await answer_of(app, "GET", "/greeting")).status == 404
    assert b"/greeting" not in await app.document()
    assert b'"/greeting"' in await app_with([extension()]).document()


async def test_a_path_of_an_extension_that_is_off_says_so() -> None:
    app = app_with([])
    app.off_paths = off_paths(["media"])
    answer = await answer_of(app, "POST", "/v1/images/generations")
    assert answer.status == 404
    assert b"the extension media is off: extensions.disabled names it" in answer.body
    assert b"is off" not in (await answer_of(app, "GET", "/v1/unknown")).body


async def test_the_root_of_an_api_does_not_stand_for_all_paths() -> None:
    """Ollama's API has `/`; the first request to a page of the workbench imported it."""
    app = app_with(own_extensions())
    assert (await answer_of(app, "GET", "/ui")).status in (200, 307, 308)
    assert not any(route.path == "/api/tags" for route in routes_of(app.served))
    await answer_of(app, "GET", "/")
    assert any(route.path == "/api/tags" for route in routes_of(app.served))


async def test_every_schema_that_the_document_names_is_in_it() -> None:
    document = (await app_with(own_extensions()).document()).decode()
    named = set(re.findall(r'"#/components/schemas/([^"]+)"', document))
    assert "OllamaShowRequest" in named
    assert named <= json.loads(document)["components"]["schemas"].keys()


async def test_an_unknown_path_suggests_one_of_a_deferred_api() -> None:
    answer = await answer_of(app_with([extension()]), "GET", "/v1/greeting")
    assert answer.status == 404
    assert b"did you mean /greeting?" in answer.body


async def test_an_api_that_cannot_be_imported_fails_its_own_requests_only() -> None:
    app = app_with([extension("no_such_package:API")])
    with capture_logs() as logs:
        assert (await answer_of(app, "GET", "/greeting")).status == 500
    assert ("cannot import an API", "no_such_package:API") in {(each["event"], each.get("api")) for each in logs}
    assert (await answer_of(app, "GET", "/v1/models")).status == 200
    assert b"/v1/models" in await app.document()


async def test_an_api_that_cannot_be_imported_is_tried_once() -> None:
    app, tries = app_with([]), Counter[str]()

    def load() -> Callable[[EdgeApp], None]:
        tries["greeting"] += 1
        raise ImportError

    app.defer(DeferredApi(name="greeting", paths=("/greeting",), load=load))
    for path in ("/unknown", "/greeting", "/unknown", "/greeting"):
        await answer_of(app, "GET", path)
    await app.document()
    assert tries["greeting"] == 1
    assert (await answer_of(app, "GET", "/greeting")).status == 500


async def test_a_caller_without_a_key_has_no_api_imported_by_an_unknown_path() -> None:
    app = app_with([extension()], keys=NoKeys())
    assert (await answer_of(app, "GET", "/unknown")).status == 401
    assert GREETING not in app.served
    assert app._deferred


async def test_other_requests_are_served_while_an_api_is_imported() -> None:
    app, released = app_with([]), threading.Event()

    def load() -> Callable[[EdgeApp], None]:
        assert released.wait(30)
        return lambda app: app.serve(GREETING)

    app.defer(DeferredApi(name="greeting", paths=("/greeting",), load=load))
    first = asyncio.create_task(answer_of(app, "GET", "/greeting"))
    assert (await answer_of(app, "GET", "/v1/models")).status == 200
    assert not first.done()
    released.set()
    assert (await first).status == 200


@pytest.mark.parametrize("hook", [hook for each in own_extensions() for hook in each.apis], ids=lambda each: each.place)
def test_the_paths_of_a_hook_are_those_of_its_api(hook: ApiHook) -> None:
    deferred = DeferredApi(name="", paths=hook.paths, load=lambda: print)
    found = {route.path for route in routes_of([load_hook(hook.place, HttpApi).router])}
    assert {path for path in found if not deferred.has(path)} == set()
    assert {path for path in hook.paths if not any(each.startswith(path) for each in found)} == set()


async def test_responses_are_imported_at_their_first_request() -> None:
    app = app_with([])
    assert "/v1/responses" not in {route.path for route in routes_of(app.served)}
    assert (await answer_of(app, "GET", "/v1/responses/resp-1")).status == 404
    assert "/v1/responses" in {route.path for route in routes_of(app.served)}
