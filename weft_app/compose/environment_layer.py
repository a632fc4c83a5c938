"""The environment as the layer of the configuration below weft.yaml, for each command that reads one."""

from collections.abc import Callable, Mapping
from functools import partial

from weft_app.compose.rate_limits import environment_rates
from weft_app.compose.registry import CLOUD_FALLBACK_VARIABLE, KEY_PATH_VARIABLE, allow_cloud_fallback
from weft_app.compose.runner_environment import RATE_PREFIX, read_environment, with_model_folders
from weft_app.config.loader import Document, Given, merge
from weft_app.config.reference import plain_value

RATE_VARIABLES = f"DEFAULT_RATE_LIMIT and {RATE_PREFIX}*"


def environment_of(service: str, environment: Mapping[str, str]) -> Callable[[Document], Document]:
    """Returns what adds the environment to a document as `service` (up, or one of `weft serve`) reads it."""
    if service == "runner":
        return read_environment(environment).applied_to
    layers: list[Callable[[Document], Document]] = []
    if service in ("up", "registry"):
        layers.append(partial(_with_registry, environment=environment))
    if service in ("up", "router"):
        layers.append(partial(_with_rates, environment=environment))
    if service == "up":
        layers.append(partial(with_model_folders, environment=environment))

    def apply(document: Document) -> Document:
        for layer in layers:
            document = layer(document)
        return document

    return apply


def _with_registry(document: Document, environment: Mapping[str, str]) -> Document:
    below: Document = {}
    if environment.get(CLOUD_FALLBACK_VARIABLE, "").strip():
        allowed = allow_cloud_fallback(None, environment)
        below["allow_cloud_fallback"] = _given(CLOUD_FALLBACK_VARIABLE, allowed)
    if environment.get(KEY_PATH_VARIABLE):
        below["governance"] = {"key_file": _given(KEY_PATH_VARIABLE, environment[KEY_PATH_VARIABLE])}
    return merge({"registry": below}, document) if below else document


def _with_rates(document: Document, environment: Mapping[str, str]) -> Document:
    read = read_environment(environment)
    router = document.get("router")
    if not read.multi_tenant or (isinstance(router, dict) and "rate_limits" in router):
        return document
    rates = environment_rates(read)
    written = {
        "default": _given(RATE_VARIABLES, plain_value(rates.default)),
        "tenants": {name: _given(RATE_PREFIX + name, plain_value(each)) for name, each in rates.tenants.items()},
    }
    return merge({"router": {"rate_limits": written}}, document)


def _given(variable: str, value: object) -> Given:
    return Given(value, f"environment variable {variable}")
