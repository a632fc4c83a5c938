"""`GET /ui`: the workbench's page and files; `GET /api/v1/caller`: what the page's key may do."""

import asyncio
import re
from importlib.metadata import version
from typing import Annotated

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from gateway.admin.join_tokens import Commands
from gateway.deps import Gateway, GatewayDeps
from gateway.intake.headers import require_own_machine
from gateway.request_facts import facts_of
from gateway.routing import collaborator
from gateway.workbench.page_files import MAX_DEPTH, VERSION_CHARS, PageFile, PageFiles
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.text.json_lines import encode_json

SURFACE = "workbench"
PAGE = "ui/"
"""Path of the page, relative to that of the mesh, which a proxy may publish under a path."""
_PAGE_SLASHES = "/ui/".count("/")
_IMMUTABLE = "public, max-age=31536000, immutable"
_ASK_AGAIN = "no-cache"
_VERSION = re.compile(rf"[0-9a-f]{{{VERSION_CHARS}}}")


Pages = Annotated[PageFiles, collaborator(PageFiles)]


async def redirect_to_page(request: Request) -> Response:
    """Redirects `/ui` to `/ui/`."""
    facts_of(request.scope).surface = SURFACE
    return RedirectResponse(PAGE, status_code=308)


async def get_page(deps: Gateway, files: Pages, request: Request) -> Response:
    """Returns the workbench's page, or one of its files below the folder of their version; needs no key.

    The page is there for every path that has no file: it draws what the path names.
    """
    facts_of(request.scope).surface = SURFACE
    _require_enabled(deps, request)
    # The first request reads and compresses all files, which takes about 0.1 s.
    assets = await asyncio.to_thread(lambda: files.assets)
    folder, _, name = request.path_params["path"].partition("/")
    if folder == files.version and name in assets:
        return _response(assets[name], request, {"cache-control": _IMMUTABLE})
    if _VERSION.fullmatch(folder):
        raise WeftError(Reason.NOT_FOUND, "the page has no such file; reload it, it may be of another version")
    return _index_response(files, request)


async def get_caller(deps: Gateway, join_command: Commands, request: Request) -> Response:
    """Returns the caller's name, tenant and scopes, whether keys are needed and prompts captured, and the version.

    `joinable`: whether runners on other machines can join here.

    Without a key, the answer only says that one is needed; a wrong key is refused.
    """
    facts_of(request.scope).surface = SURFACE
    gate = deps.gate
    principal = gate.identify(request.scope)
    fields: dict[str, object] = {
        "kind": "Caller",
        "keysRequired": gate.needs_keys,
        "authenticated": principal is not None,
        "version": version("weft"),
    }
    if principal is not None:
        fields |= {"name": principal.name, "tenant": principal.tenant, "scopes": sorted(map(str, principal.access))}
        tenant = deps.fleet.view.tenants.get(principal.tenant)
        fields["joinable"] = join_command("") is not None
        fields["captured"] = tenant is not None and tenant.manifest.capture
        if (url := deps.config.workbench.trace_url) is not None:
            fields["traceUrl"] = url
    return Response(encode_json(fields), media_type="application/json", headers={"cache-control": "no-store"})


def _require_enabled(deps: GatewayDeps, request: Request) -> None:
    """Raises NOT_FOUND if the page is disabled, PERMISSION_DENIED if anyone on the network could use it."""
    if not deps.config.workbench.enabled:
        raise WeftError(Reason.NOT_FOUND, "the workbench is switched off (`gateway.workbench.enabled`)")
    if not deps.gate.needs_keys:
        require_own_machine(request.scope, "the workbench needs keys beyond this machine (auth.required: true)")


def _index_response(files: PageFiles, request: Request) -> Response:
    # As the browser counts them: an encoded slash is none.
    depth = request.scope["raw_path"].count(b"/") - _PAGE_SLASHES
    if not 0 <= depth <= MAX_DEPTH:
        raise WeftError(Reason.NOT_FOUND, f"the path of a page has at most {MAX_DEPTH} slashes below /ui/")
    index = files.index(depth)
    headers = {
        "cache-control": _ASK_AGAIN,
        "etag": f'"{files.version}"',
        "content-security-policy": index.policy,
        "cross-origin-opener-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "permissions-policy": "camera=(), geolocation=(), microphone=(self)",
    }
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return _response(index, request, headers)


def _response(file: PageFile, request: Request, headers: dict[str, str]) -> Response:
    body = file.body
    if file.policy:
        headers = {"content-security-policy": file.policy, **headers}
    headers = {**headers, "vary": "accept-encoding"}
    if file.compressed is not None and "gzip" in request.headers.get("accept-encoding", ""):
        body = file.compressed
        headers["content-encoding"] = "gzip"
    return Response(body, headers={**headers, "content-type": file.content_type})
