"""Checks the model list of a server that runs already, for `weft doctor` and `weft runner join`."""

import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from runner_svc.openai_upstream.unmanaged_server import read_key
from runner_svc.policy.model_list import listed_models, not_listed_message
from runner_svc.runtimes.openai_http.settings import OpenAiHttpModel
from runner_svc.runtimes.runtime import ModelFault
from weft.kernel.errors import WeftError

TIMEOUT_SECONDS = 3.0
MAX_BODY_BYTES = 8 * 1024 * 1024
_NO_LIST = frozenset({404, 405, 501})
_START_IT = "start the server, or correct `url`"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Refuses redirects: an API key is sent to the configured server only."""


def fault_of_server(model: OpenAiHttpModel, environment: Mapping[str, str]) -> ModelFault | None:
    """Requests the model list with a short timeout. None: the model is listed, or no list is served."""
    name = model.upstream_model or model.name
    base = model.url.rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        key = read_key(model.api_key_env, environment)
    except WeftError as error:
        return ModelFault(message=error.message, remedy=f"export {model.api_key_env}=...")
    shown = _without_user(base)
    headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(f"{base}/v1/models", headers=headers)  # noqa: S310 - http or https, by the section
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)
    try:
        with opener.open(request, timeout=TIMEOUT_SECONDS) as answer:
            body = answer.read(MAX_BODY_BYTES)
    except urllib.error.HTTPError as error:
        return _fault_of_status(error.code, shown)
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)
        return ModelFault(message=f"{shown} does not answer: {why}", remedy=_START_IT)
    listed = listed_models(body)
    if listed.has(name):
        return None
    return ModelFault(message=not_listed_message(name, listed), remedy="set upstream_model", is_there=True)


def _without_user(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _fault_of_status(status: int, base: str) -> ModelFault | None:
    if status in _NO_LIST or status == 429:
        return None
    if status in {401, 403}:
        return ModelFault(message=f"{base} refuses the key (status {status})", remedy="set api_key_env")
    return ModelFault(message=f"{base} answers the request for its models with status {status}", remedy=_START_IT)
