"""The endpoints of Ollama's API that change models by its own means: refused with what to use instead."""

import re
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from gateway.ollama.deps import SURFACE
from gateway.request_facts import facts_of
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
INSTEAD = {
    "create": "models are made by weft.yaml or `weft apply`; one with a system prompt and parameters is an agent",
    "copy": "a second name of a model is another model of weft.yaml with the same file, or a pool or a route",
    "push": "nothing is uploaded: a model's files stay where they are",
    "delete": "models are removed by `weft delete model NAME`, their files by `weft models rm`",
    "blob": "files are not uploaded: `weft pull` takes a folder, a URL or a name on the hub",
}
"""By what an endpoint is asked for."""


async def refuse(what: str, request: Request) -> Response:
    """Raises UNSUPPORTED_OPERATION, which says what to use instead."""
    facts_of(request.scope).surface = SURFACE
    raise WeftError(Reason.UNSUPPORTED_OPERATION, f"not over Ollama's API: {INSTEAD[what]}")


async def refuse_blob(request: Request) -> Response:
    """Raises as `refuse`, and INVALID_ARGUMENT for what is no digest."""
    if _DIGEST.fullmatch(request.path_params["digest"]) is None:
        raise invalid_field("digest", "must be sha256: and 64 hex digits")
    return await refuse("blob", request)


refuse_create, refuse_copy, refuse_push, refuse_delete = (
    partial(refuse, what) for what in ("create", "copy", "push", "delete")
)
