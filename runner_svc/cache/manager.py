"""Who may use what of the prefix caches of a runner, and how they are flushed."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, Self

import structlog

from runner_svc.backend.port import Backend, CacheIsolation, ErasedCache
from runner_svc.cache.model_cache import ModelCache, RequestCache
from runner_svc.cache.salts import SaltStore
from runner_svc.memory.estimate import read_model_facts
from runner_svc.policy.load_parameters import LoadValue
from runner_svc.policy.load_plan import LoadPlan
from runner_svc.policy.memory_estimate import CACHE_TYPE_BYTES, MemorySettings
from weft.api.common.v1 import usage_pb2
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.dispatch.handling import cache_tag
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.names import MAX_TENANT_CHARS, require_token
from weft.kernel.reasons import Reason
from weft.kernel.request import Handling

log = structlog.get_logger("weft.runner")

_Scope = pb.FlushCacheRequest.Scope
_FIELDS: Mapping["_Scope.ValueType", tuple[frozenset[str], frozenset[str]]] = {
    pb.FlushCacheRequest.SCOPE_ALL: (frozenset(), frozenset({"model"})),
    pb.FlushCacheRequest.SCOPE_MODEL: (frozenset({"model"}), frozenset({"model"})),
    pb.FlushCacheRequest.SCOPE_TENANT: (frozenset({"tenant"}), frozenset({"tenant", "model"})),
    pb.FlushCacheRequest.SCOPE_TAG: (frozenset({"tag"}), frozenset({"tag", "tenant", "model"})),
}
"""What each scope needs, and what it may have."""


class CachedModel(Protocol):
    """What the desk knows a model by."""

    @property
    def model(self) -> str:
        """Its name in the mesh."""
        ...

    @property
    def backend(self) -> Backend:
        """Its engine."""
        ...

    @property
    def model_path(self) -> Path | None:
        """Its file; None: there is none, or it is not ours."""
        ...

    @property
    def plan(self) -> LoadPlan:
        """How it is loaded."""
        ...


class CacheManager:
    """The prefix caches of all models of a runner."""

    def __init__(self, caches: Iterable[ModelCache]) -> None:
        self._caches = {cache.model: cache for cache in caches}

    @classmethod
    def over(cls, models: Iterable[CachedModel], state_folder: Path | None = None) -> Self:
        """The caches of these models. Salts are kept in `state_folder`; None: for this life only."""
        return cls(_cache_of(model, state_folder) for model in models)

    def of_request(self, model: str, tenant: str, handling: Handling) -> RequestCache:
        """How one request uses the cache of its model."""
        return RequestCache(self._caches[model], tenant, handling)

    def note(self, model: str, usage: usage_pb2.Usage) -> None:
        """Count an answered request by its engine's figures."""
        self._caches[model].figures.note(usage)

    def figures(self, model: str) -> pb.CacheFigures:
        """What the cache of a model did since the runner started."""
        figures = self._caches[model].figures
        return pb.CacheFigures(
            hit_count=figures.hit_count,
            miss_count=figures.miss_count,
            prompt_token_count=figures.prompt_token_count,
            cached_token_count=figures.cached_token_count,
        )

    async def flush(self, request: pb.FlushCacheRequest) -> pb.FlushCacheResponse:
        """Forget what the request names; nobody is shown any of it once this begins. Its permit is not looked at.

        Raises INVALID_ARGUMENT naming the field, MODEL_NOT_FOUND, UNSUPPORTED_OPERATION where no engine that is meant
        can forget, and what an engine failed with: then it may still hold what nobody is shown any more.
        """
        _check(request)
        caches = list(self._caches.values())
        if request.model:
            if request.model not in self._caches:
                raise WeftError(Reason.MODEL_NOT_FOUND, f"this runner does not serve {request.model}")
            caches = [self._caches[request.model]]
        asked = [cache.forget(request.tenant or None, request.tag or None) for cache in caches]
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        erased: list[tuple[ModelCache, ErasedCache]] = []
        failures: list[BaseException] = []
        for cache, outcome in zip(caches, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                failures.append(outcome)
            else:
                erased.append((cache, outcome))
        _raise_what_counts(failures, some_erased=bool(erased))
        response = await _response(erased)
        log.info("prefix cache flushed", scope=_Scope.Name(request.scope), entries=response.entry_count)
        return response

    async def close(self) -> None:
        """End what still runs in the background."""
        for cache in self._caches.values():
            await cache.close()


def _cache_of(model: CachedModel, state_folder: Path | None) -> ModelCache:
    async def token_size() -> int | None:
        return await kv_bytes_per_token(model.model_path, model.plan.parameters)

    return ModelCache(model.model, model.backend, salt_book=_salts(model, state_folder), token_size=token_size)


def _salts(model: CachedModel, folder: Path | None) -> SaltStore | None:
    if model.backend.cache_isolation is not CacheIsolation.SALT:
        return None
    return SaltStore(None if folder is None else folder / f"cache-salts-{model.model}.json")


def _check(request: pb.FlushCacheRequest) -> None:
    if request.scope not in _FIELDS:
        raise invalid_field("scope", "must be all, model, tenant or tag")
    needed, allowed = _FIELDS[request.scope]
    for name in ("model", "tenant", "tag"):
        given = bool(getattr(request, name))
        if name in needed and not given:
            raise invalid_field(name, "must be set for this scope")
        if given and name not in allowed:
            # Whoever sets it wants less forgotten than this scope would.
            raise invalid_field(name, "must not be set for this scope")
    if request.tenant:
        require_token(request.tenant, "tenant", MAX_TENANT_CHARS)
    if request.tag:
        cache_tag(request.tag, "tag")


def _raise_what_counts(failures: Sequence[BaseException], *, some_erased: bool) -> None:
    for failure in failures:
        unable = isinstance(failure, WeftError) and failure.reason is Reason.UNSUPPORTED_OPERATION
        if not (unable and some_erased):
            raise failure
        log.warning("an engine cannot forget what it has cached", message=str(failure))


async def _response(erased: Sequence[tuple[ModelCache, ErasedCache]]) -> pb.FlushCacheResponse:
    response = pb.FlushCacheResponse(entry_count=sum(found.entry_count for _, found in erased))
    tokens = [found.token_count for _, found in erased]
    if None not in tokens:
        response.token_count = sum(filter(None, tokens))
    sizes = [await _bytes(cache, found) for cache, found in erased]
    if None not in sizes:
        response.reusable_bytes = sum(filter(None, sizes))
    return response


async def _bytes(cache: ModelCache, erased: ErasedCache) -> int | None:
    if not erased.token_count:
        return erased.token_count
    per_token = await cache.token_size()
    return None if per_token is None else erased.token_count * per_token


async def kv_bytes_per_token(model_path: Path | None, parameters: Mapping[str, LoadValue]) -> int | None:
    """Keys and values of one token in bytes, with the cache types of a load; None: the file does not say."""
    if model_path is None:
        return None
    shape = (await asyncio.to_thread(read_model_facts, model_path)).shape
    usual = MemorySettings(context_tokens=0)
    keys = CACHE_TYPE_BYTES.get(str(parameters.get("cache_type_k", usual.cache_type_k)))
    values = CACHE_TYPE_BYTES.get(str(parameters.get("cache_type_v", usual.cache_type_v)))
    if shape is None or keys is None or values is None:
        return None
    return round(shape.keys_per_token * keys + shape.values_per_token * values)
