"""Environment variables of the commands that read a configuration.

They override defaults, and weft.yaml and the command line override them: what the file does not set is merged into
the document. The variables of the runner API, for containers, include settings that only a runner's HTTP API reads.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from runner_svc.policy.engine_variables import is_listed
from runner_svc.runtimes.table import DEFAULT_RUNTIME, find_runtime
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.values.names import MAX_TENANT_CHARS, is_token
from weft.kernel.values.units import Rate, RateUnit, parse_rates
from weft_app.compose.demo import demo_runner_document
from weft_app.config.config import WeftConfig
from weft_app.config.document import Document, Given, merge, value_of
from weft_app.config.settings_tree import plain_value

RATE_PREFIX = "TENANT_RATE_LIMIT_"
RATE_VARIABLES = f"DEFAULT_RATE_LIMIT and {RATE_PREFIX}*"
DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
CLOUD_FALLBACK_VARIABLE = "WEFT_ALLOW_CLOUD_FALLBACK"
KEY_PATH_VARIABLE = "VERIFIED_OP_TOKEN_KEY_PATH"
DEFAULT_RATES = (Rate(50, 60),)
"""50 requests per minute, if tenants are limited at all."""
MAX_TENANTS_NAMED = 1000

_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_LEVELS = {
    "debug": "debug",
    "info": "info",
    "warn": "warning",
    "warning": "warning",
    "error": "error",
    "critical": "error",
}
_FORMATS = {"json": "json", "text": "text", "console": "text", "pretty": "text"}
_NUMBER = re.compile(r"\d{1,9}")
_DEVICE = re.compile(r"-?\d{1,4}")
_MAX_DEVICE = 63

LogFormat = Literal["json", "text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerEnvironment:
    """The parsed environment. None or empty: not set."""

    log_level: str | None = None
    log_format: LogFormat | None = None
    model_folders: tuple[Path, ...] = ()
    """Folders to search for relative model paths, in order."""
    context_tokens: int | None = None
    devices: tuple[int, ...] | None = None
    """Numbers of the usable accelerators; empty: none."""
    devices_by_id: bool = False
    """Whether accelerators are given by ids instead of numbers."""
    max_queue_depth: int | None = None
    queue_timeout_seconds: float | None = None
    multi_tenant: bool = False
    default_rates: tuple[Rate, ...] = ()
    """At most one rate of requests and one of tokens; a runner's HTTP API counts only requests."""
    tenant_rates: Mapping[str, tuple[Rate, ...]] = field(default_factory=dict)
    metrics: bool = True
    metrics_port: int | None = None
    ignored: tuple[tuple[str, str], ...] = ()
    """Variables that are set but have no effect, with the reason."""

    def ignored_by(self, config: WeftConfig) -> tuple[tuple[str, str], ...]:
        """Returns the variables that no runner of a configuration reads either, with the reason."""
        read = [name for section in config.runners or () for name in section.engine.variables]
        return tuple((name, why) for name, why in self.ignored if not is_listed(name, read))

    def applied_to(self, document: Document) -> Document:
        """Adds the environment to what the document does not set. Raises INVALID_ARGUMENT naming the variable."""
        below: Document = {}
        if self.log_level is not None:
            below["log"] = {"level": _of("LOG_LEVEL", self.log_level)}
        router = {
            "queue_depth_per_runner": _of("MAX_QUEUE_DEPTH", self.max_queue_depth),
            "queue_timeout_seconds": _of("QUEUE_TIMEOUT_MS", self.queue_timeout_seconds),
        }
        below["router"] = {name: given for name, given in router.items() if given.value is not None}
        if self.multi_tenant and not _has_rates(document, "gateway"):
            below["gateway"] = {"rate_limits": self._request_rates()}
        if self.devices == ():
            below["accelerators"] = {"nvidia": _of(DEVICES_VARIABLE, value=False)}
        merged = merge(below, document)
        runners = value_of(merged.get("runners"))
        if runners is None and (self.devices or self.devices_by_id or self.context_tokens is not None):
            # The demo runner must respect the visible devices, too.
            runners = [demo_runner_document()]
        if isinstance(runners, list):
            merged["runners"] = [self._runner(runner) if isinstance(runner, dict) else runner for runner in runners]
        return merged

    def _request_rates(self) -> Document:
        """Returns the rates of a runner's HTTP API, which counts only requests."""
        tenants = {
            name: _of(RATE_PREFIX + name, plain_value(rate))
            for name, rates in self.tenant_rates.items()
            for rate in rates
            if rate.unit is RateUnit.REQUESTS
        }
        found: Document = {"tenants": tenants}
        for rate in self.default_rates:
            if rate.unit is RateUnit.REQUESTS:
                found["default"] = _of(RATE_VARIABLES, plain_value(rate))
        return found

    def _runner(self, runner: Document) -> Document:
        if self.devices_by_id and not value_of(runner.get("devices")) and _starts_engines(runner):
            name = value_of(runner.get("name"))
            raise invalid_field(
                DEVICES_VARIABLE,
                f"must hold numbers such as 0,1; or set `devices` for runner {name} in weft.yaml",
            )
        devices = [_of(DEVICES_VARIABLE, device) for device in self.devices or ()]
        below: Document = {"devices": devices} if devices else {}
        models = runner.get("models")
        if isinstance(models, list):
            models = [self._model(model) if isinstance(model, dict) else model for model in models]
            return {**below, **runner, "models": models}
        return {**below, **runner}

    def _model(self, model: Document) -> Document:
        found = dict(model)
        if self.context_tokens is not None:
            found.setdefault("context_tokens", _of("VLLM_MAX_MODEL_LEN", self.context_tokens))
        if "path" in model:
            found["path"] = self._found(model["path"])
        quantizations = model.get("quantizations")
        if isinstance(quantizations, dict):
            found["quantizations"] = {name: self._found(path) for name, path in quantizations.items()}
        return found

    def _found(self, item: Any) -> Any:
        """Returns the path of a model file: unchanged, or in the first model folder that contains it."""
        text = value_of(item)
        if not isinstance(text, (str, Path)):
            return item
        path = Path(text)
        if path.is_absolute() or str(path).startswith("~") or _exists(path):
            return item
        found = next((folder / path for folder in self.model_folders if _exists(folder / path)), None)
        if found is None:
            return item
        return Given(str(found), f"{item.source}, found in a folder of models" if isinstance(item, Given) else "")


def _exists(path: Path) -> bool:
    """Whether a path exists and can be reached: folders may be those of another user."""
    try:
        return path.exists()
    except OSError:
        return False


def with_model_folders(document: Document, environment: Mapping[str, str]) -> Document:
    """Applies the model folders only, for a mesh whose runners inherit this environment.

    Raises INVALID_ARGUMENT naming a variable that runners would reject.
    """
    read = read_environment(environment)
    read.applied_to(document)
    return RunnerEnvironment(model_folders=read.model_folders).applied_to(document)


def environment_of_mesh(document: Document, environment: Mapping[str, str]) -> Document:
    """Returns the document of `weft up`. Its registry reads its variables itself, and its errors name them."""
    return with_model_folders(with_rates(document, environment), environment)


def _of(variable: str, value: Any) -> Given:
    return Given(value, f"environment variable {variable}")


def _starts_engines(runner: Document) -> bool:
    runtime = find_runtime(str(value_of(runner.get("runtime", DEFAULT_RUNTIME))))
    return runtime is not None and runtime.starts_engines


def read_environment(environment: Mapping[str, str]) -> RunnerEnvironment:
    """Parses the variables. Raises INVALID_ARGUMENT naming the invalid one."""
    given = {name: value.strip() for name, value in environment.items()}
    filled = {name: value for name, value in given.items() if value}
    tenants = _tenant_rates(filled)
    multi_tenant = _flag(filled, "ENABLE_MULTI_TENANT", default=False)
    metrics = _flag(filled, "ENABLE_METRICS", default=True)
    devices, by_id = _devices(given)
    timeout_ms = _number(filled, "QUEUE_TIMEOUT_MS", 1, 86_400_000)
    return RunnerEnvironment(
        log_level=_word(filled, "LOG_LEVEL", _LEVELS),
        log_format="json" if (word := _word(filled, "LOG_FORMAT", _FORMATS)) == "json" else "text" if word else None,
        model_folders=tuple(
            Path(filled[name]).expanduser() for name in ("MODEL_BASE_PATH", "HF_HOME") if name in filled
        ),
        context_tokens=_number(filled, "VLLM_MAX_MODEL_LEN", 16, 16_777_216),
        devices=devices,
        devices_by_id=by_id,
        max_queue_depth=_number(filled, "MAX_QUEUE_DEPTH", 0, 1_000_000),
        queue_timeout_seconds=None if timeout_ms is None else timeout_ms / 1000,
        multi_tenant=multi_tenant,
        default_rates=_first_of_each_unit((*tenants.pop("default", ()), *_rates(filled, "DEFAULT_RATE_LIMIT"))),
        tenant_rates=tenants,
        metrics=metrics,
        metrics_port=_number(filled, "METRICS_PORT", 1, 65_535) if metrics else None,
        ignored=tuple(_ignored(filled, multi_tenant=multi_tenant, metrics=metrics)),
    )


def _word(given: Mapping[str, str], name: str, words: Mapping[str, str]) -> str | None:
    if name not in given:
        return None
    found = words.get(given[name].lower())
    if found is None:
        raise invalid_field(name, f"must be one of {', '.join(words)}")
    return found


def _flag(given: Mapping[str, str], name: str, *, default: bool) -> bool:
    if name not in given:
        return default
    found = _WORDS.get(given[name].lower())
    if found is None:
        raise invalid_field(name, "must be true or false")
    return found


def _number(given: Mapping[str, str], name: str, least: int, most: int) -> int | None:
    if name not in given:
        return None
    text = given[name]
    if _NUMBER.fullmatch(text) is None or not least <= int(text) <= most:
        raise invalid_field(name, f"must be a whole number from {least} to {most}")
    return int(text)


def _rates(given: Mapping[str, str], name: str) -> tuple[Rate, ...]:
    """Parses one rate, or one of each unit, as in `100req/min,20000tok/min`."""
    rates = parse_rates(given[name].split(","), name) if name in given else ()
    if len({rate.unit for rate in rates}) < len(rates):
        raise invalid_field(name, "has two rates of the same unit")
    return _first_of_each_unit(rates)


def _first_of_each_unit(rates: Sequence[Rate]) -> tuple[Rate, ...]:
    first = {rate.unit: rate for rate in reversed(rates)}
    return tuple(first[unit] for unit in RateUnit if unit in first)


def _tenant_rates(given: Mapping[str, str]) -> dict[str, tuple[Rate, ...]]:
    rates: dict[str, tuple[Rate, ...]] = {}
    for name in given:
        if name.startswith(RATE_PREFIX):
            tenant = name.removeprefix(RATE_PREFIX)
            if not is_token(tenant, MAX_TENANT_CHARS):
                raise invalid_field(name, "must end with the name of a tenant")
            rates[tenant] = _rates(given, name)
    for unit in RateUnit:
        if sum(rate.unit is unit for each in rates.values() for rate in each) > MAX_TENANTS_NAMED:
            raise invalid_field(RATE_PREFIX, f"at most {MAX_TENANTS_NAMED} tenants can be named")
    return rates


def _devices(given: Mapping[str, str]) -> tuple[tuple[int, ...] | None, bool]:
    """Returns the device numbers, and whether ids are given instead. As in CUDA, a negative number ends the list."""
    text = given.get(DEVICES_VARIABLE)
    if text is None:
        return None, False
    found: list[int] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if _DEVICE.fullmatch(part) is None:
            return None, True
        if int(part) < 0:
            break
        if int(part) > _MAX_DEVICE or int(part) in found:
            raise invalid_field(DEVICES_VARIABLE, f"must hold each number once, from 0 to {_MAX_DEVICE}")
        found.append(int(part))
    return tuple(sorted(found)), False


def _ignored(given: Mapping[str, str], *, multi_tenant: bool, metrics: bool) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name in sorted(given):
        if name == "VLLM_ENABLE_PREFIX_CACHING":
            if _flag(given, name, default=True) is False:
                found.append((name, "engines cache prefixes; a request with X-Cache-Mode: none uses none"))
        elif name.startswith("VLLM_") and name != "VLLM_MAX_MODEL_LEN":
            found.append((name, "no engine that weft runs has such a setting"))
        elif not multi_tenant and (name.startswith(RATE_PREFIX) or name == "DEFAULT_RATE_LIMIT"):
            found.append((name, "tenants are limited only with ENABLE_MULTI_TENANT=true"))
        elif name == "METRICS_PORT" and not metrics:
            found.append((name, "ENABLE_METRICS is false"))
        elif name == KEY_PATH_VARIABLE:
            found.append((name, "tokens are checked by the registry; set it there"))
    return found


def allow_cloud_fallback(configured: bool | None, environment: Mapping[str, str]) -> bool:
    """Whether routes may fall back to remote models until an operator changes it.

    `configured` is the value of weft.yaml, if any. Raises INVALID_ARGUMENT naming the variable.
    """
    if configured is not None:
        return configured
    filled = {name: value.strip() for name, value in environment.items() if value.strip()}
    return _flag(filled, CLOUD_FALLBACK_VARIABLE, default=True)


def environment_of(service: str, environment: Mapping[str, str]) -> Callable[[Document], Document]:
    """Returns a function that merges the environment into the document of `weft up` or a service of `weft serve`."""
    if service == "runner":
        return read_environment(environment).applied_to
    layers: list[Callable[[Document], Document]] = []
    if service in ("up", "registry"):
        layers.append(partial(_with_registry, environment=environment))
    if service in ("up", "router"):
        layers.append(partial(with_rates, environment=environment))
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
        below["allow_cloud_fallback"] = _of(CLOUD_FALLBACK_VARIABLE, allowed)
    if environment.get(KEY_PATH_VARIABLE):
        below["governance"] = {"key_file": _of(KEY_PATH_VARIABLE, environment[KEY_PATH_VARIABLE])}
    return merge({"registry": below}, document) if below else document


def with_rates(document: Document, environment: Mapping[str, str]) -> Document:
    """Returns the document with the rates of a router's tenants. `rate_limits` in the file replaces all of them."""
    read = read_environment(environment)
    if not read.multi_tenant or _has_rates(document, "router"):
        return document
    written = {
        "default": _of(RATE_VARIABLES, plain_value(read.default_rates or DEFAULT_RATES)),
        "tenants": {name: _of(RATE_PREFIX + name, plain_value(rates)) for name, rates in read.tenant_rates.items()},
    }
    return merge({"router": {"rate_limits": written}}, document)


def _has_rates(document: Document, section: str) -> bool:
    found = document.get(section)
    return isinstance(found, dict) and value_of(found.get("rate_limits")) is not None
