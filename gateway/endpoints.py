"""All HTTP endpoints of a gateway. Each API declares its own (`openai/openai_endpoints`)."""

from collections.abc import Iterable, Mapping

from gateway.admin.admin_endpoints import ADMIN, CAPTURES, JOIN_TOKENS, KEYS, REQUESTS, SECRETS, USAGE
from gateway.gateway_health import HEALTH, METRICS, PROBES
from gateway.http_api import HttpApi
from gateway.openai.openai_endpoints import OPENAI, QUOTES
from gateway.openapi import answers, answers_events, bytes_body, shown_path
from gateway.resources.resource_endpoints import RESOURCES, SETTINGS, resource_router
from gateway.resources.resource_handlers import API as RESOURCE_PATH
from gateway.routing import OPENAPI, ApiRouter, get_docs, get_openapi, needs_of, routes_of
from gateway.tasks.task_endpoints import TASKS
from gateway.watch import watch_handlers as watching
from gateway.workbench.pdf_text import PDF, PdfText, extract_pdf_text
from gateway.workbench.serving import get_caller, get_page, redirect_to_page
from weft.documents.resource_kinds import ResourceKind
from weft.extension import ApiHook, Extension, all_extensions, disabled_extensions, load_hook, own_extensions
from weft.kernel.access.principal import USE_MODELS, VIEW_MODELS

WATCH = ApiRouter("resources")
# The kinds in the request determine the access that a key needs.
WATCH.add_get(
    "/api/v1/watch",
    None,
    watching.watch,
    answers_events(query=watching.PARAMETERS),
    needs_key=True,
)

DOCUMENT = ApiRouter("document")
DOCUMENT.add_get(OPENAPI, VIEW_MODELS, get_openapi, with_head=True, in_schema=False, by_name=True)
DOCUMENT.add_get("/docs", None, get_docs, with_head=True, in_schema=False)

WORKBENCH = ApiRouter("workbench")
WORKBENCH.add_get("/ui", None, redirect_to_page, with_head=True, in_schema=False)
WORKBENCH.add_get("/ui/{path:path}", None, get_page, with_head=True, in_schema=False)
WORKBENCH.add_get("/api/v1/caller", None, get_caller)
WORKBENCH.add_post("/api/v1/pdf-text", USE_MODELS, extract_pdf_text, bytes_body(PDF) | answers(PdfText))

GATEWAY_ROUTERS: tuple[ApiRouter, ...] = (
    OPENAI,
    RESOURCES,
    WATCH,
    SETTINGS,
    HEALTH,
    PROBES,
    METRICS,
    ADMIN,
    JOIN_TOKENS,
    KEYS,
    SECRETS,
    CAPTURES,
    REQUESTS,
    QUOTES,
    USAGE,
    TASKS,
    WORKBENCH,
    DOCUMENT,
)
"""The endpoints that each gateway needs. Those without their collaborators are not served."""
_BATCHES = "gateway.batches.batch_endpoints"
DEFERRED_APIS = (
    ApiHook(
        place="gateway.responses.response_endpoints:API",
        paths=("/v1/responses", "/v1/responses/", "/v1/conversations", "/v1/conversations/"),
    ),
    ApiHook(place="gateway.anthropic.anthropic_endpoints:API", paths=("/v1/messages", "/v1/messages/")),
    ApiHook(place=f"{_BATCHES}:FILE_API", paths=("/v1/files", "/v1/files/")),
    ApiHook(place=f"{_BATCHES}:RESULT_API", paths=("/v1/results/",)),
    ApiHook(place=f"{_BATCHES}:BATCH_API", paths=("/v1/batches", "/v1/batches/")),
)
"""APIs of the core that many meshes never use, imported at their first request as those of extensions are."""


def kinds_with(extensions: Iterable[Extension]) -> tuple[ResourceKind, ...]:
    """Returns the kinds of resources of a mesh with these extensions."""
    off = {kind for each in own_extensions() for kind in each.kinds}
    off -= {kind for each in extensions for kind in each.kinds}
    return tuple(kind for kind in ResourceKind if kind not in off)


def off_paths(disabled: Iterable[str]) -> Mapping[str, str]:
    """Returns why paths are not served, by path: those of the APIs and kinds of extensions that are off."""
    found = all_extensions()
    off = disabled_extensions(found, disabled)
    paths: dict[str, str] = {}
    for each in (each for each in found if each.name in off):
        kinds = (f"{RESOURCE_PATH}/{ResourceKind(kind).plural}" for kind in each.kinds)
        own = (*(path for hook in each.apis for path in hook.paths), *kinds)
        paths |= dict.fromkeys(own, f"the extension {each.name} is off: {off[each.name]}")
    return paths


def core_routers(extensions: Iterable[Extension]) -> tuple[ApiRouter, ...]:
    """Returns GATEWAY_ROUTERS without the endpoints of kinds that other extensions have."""
    resources = resource_router(kinds_with(extensions))
    return tuple(resources if each is RESOURCES else each for each in GATEWAY_ROUTERS)


def gateway_routers(extensions: Iterable[Extension]) -> tuple[ApiRouter, ...]:
    """Returns the endpoints of a gateway with these extensions. Imports their APIs."""
    hooks = (*DEFERRED_APIS, *(hook for extension in extensions for hook in extension.apis))
    return (*core_routers(extensions), *(load_hook(hook.place, HttpApi).router for hook in hooks))


def docs_table(extensions: Iterable[Extension], of_runner: Iterable[ApiRouter]) -> str:
    """Returns the table of endpoints in the documentation; `of_runner`: those of a runner's API."""
    servers: dict[tuple[str, str, str], list[str]] = {}
    for routers, server in ((gateway_routers(extensions), "gateway"), (tuple(of_runner), "runner")):
        routes = [(route, method) for route in routes_of(routers) for method in route.methods or ()]
        heads = {route.path for route, method in routes if method == "HEAD"}
        for route, method in routes:
            if method == "HEAD":
                continue
            needs = needs_of(route)
            access = "those of its kinds" if needs.key else f"`{needs.access or 'none'}`"
            words = "GET, HEAD" if method == "GET" and route.path in heads else method
            servers.setdefault((shown_path(route.path), words, access), []).append(server)
    rows = [f"| `{words} {path}` | {access} | {', '.join(of)} |" for (path, words, access), of in servers.items()]
    return "\n".join(("| endpoint | a key needs | served by |", "|---|---|---|", *rows)) + "\n"
