"""The prefix caches of a runner: use by requests, flushes, figures."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path

from runner_svc.backend.port import CacheIsolation, ErasedCache
from runner_svc.cache.cached_model import CachedModel
from runner_svc.cache.model_cache import ModelCache, RequestCache, RunningTurn, SaltStore
from runner_svc.cache.prompt_store import PromptStore
from runner_svc.cache.prompt_transfer import PromptFetcher
from runner_svc.policy.cache_directory import Partition
from weft.api.common.v1 import usage_pb2
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.api.runner.v1.ticket_pb2 import PromptSource
from weft.dispatch.frames import GenerationPayload
from weft.dispatch.parameter_checks import cache_tag
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Handling
from weft.kernel.telemetry.log import get_logger
from weft.kernel.values.names import MAX_TENANT_CHARS, require_token

log = get_logger("weft.runner")

_Scope = pb.FlushCacheRequest.Scope
_FIELDS: Mapping["_Scope.ValueType", tuple[frozenset[str], frozenset[str]]] = {
    pb.FlushCacheRequest.SCOPE_ALL: (frozenset(), frozenset({"model"})),
    pb.FlushCacheRequest.SCOPE_MODEL: (frozenset({"model"}), frozenset({"model"})),
    pb.FlushCacheRequest.SCOPE_TENANT: (frozenset({"tenant"}), frozenset({"tenant", "model"})),
    pb.FlushCacheRequest.SCOPE_TAG: (frozenset({"tag"}), frozenset({"tag", "tenant", "model"})),
}
"""Required and optional fields by scope."""


class CacheManager:
    """The prefix caches of all models of a runner."""

    def __init__(
        self,
        models: Iterable[CachedModel],
        state_folder: Path | None = None,
        store: PromptStore | None = None,
        fetcher: PromptFetcher | None = None,
    ) -> None:
        """Salts are stored in `state_folder`; None: in memory.

        `store`: for the prompts of engines that end; None: they are forgotten. `fetcher`: for those of other runners.
        """
        models = tuple(models)
        self._store, self._fetcher = store, fetcher
        self._caches = {model.model: self._cache_of(model, state_folder) for model in models}
        self._model_of = {name: model.model for model in models for name in model.names if name != model.model}
        """Models by the name of their adapter; an adapter shares its model's cache."""

    def add(self, model: CachedModel) -> None:
        """Adds the cache of a newly served model; replaces one with the same name."""
        self._caches[model.model] = self._cache_of(model, None)

    def remove(self, model: CachedModel) -> None:
        """Removes the cache of a model that is no longer served, unless another model has its name."""
        if self.has(model):
            del self._caches[model.model]

    def has(self, model: CachedModel) -> bool:
        """Whether it has the cache of this model, as opposed to that of a replaced one."""
        found = self._caches.get(model.model)
        return found is not None and found.served is model

    def of_request(
        self, model: str, tenant: str, handling: Handling, source: PromptSource | None = None
    ) -> RequestCache:
        """Returns the cache use of a request to a model or an adapter. `source`: a runner with more of its prompt."""
        return RequestCache(self._cache(model), tenant, handling, model if model in self._model_of else "", source)

    def kind(self, model: str) -> str:
        """See ModelCache.kind."""
        return self._cache(model).kind

    def lent(self, model: str, tenant: str, digest: int, kind: str) -> AsyncGenerator[pb.FetchPromptResponse]:
        """See ModelCache.lent."""
        return self._cache(model).lent(tenant, digest, kind)

    async def ahead(self, model: str, partition: Partition, payload: GenerationPayload) -> RunningTurn | None:
        """Cache use of a turn without a waiting request; see ModelCache.ahead."""
        return await self._cache(model).ahead(partition, payload)

    def note(self, model: str, usage: usage_pb2.Usage) -> None:
        """Counts an answered request by the engine's figures."""
        self._cache(model).note(usage)

    def note_prewarmed(self, model: str, token_count: int) -> None:
        """Counts a prompt that was processed before a request needed it."""
        self._cache(model).figures.prewarmed_token_count += token_count

    def figures(self, model: str) -> pb.CacheFigures:
        """Returns a model's cumulative cache figures since the runner started. Read-only.

        An adapter has the figures of its model, which include everything that shares its engine.
        """
        return self._cache(model).figures

    async def flush(self, request: pb.FlushCacheRequest) -> pb.FlushCacheResponse:
        """Flushes a request's scope, which is not used any more once the call has started. Does not check permits.

        Raises INVALID_ARGUMENT naming the field, MODEL_NOT_FOUND, UNSUPPORTED_OPERATION if no engine in the scope can
        flush, and the error of an engine or of a disk: it may then still hold the text, which is not used any more.
        """
        _check(request)
        caches = list(self._caches.values())
        if request.model:
            model = self._model_of.get(request.model, request.model)
            if model not in self._caches:
                raise WeftError(Reason.MODEL_NOT_FOUND, f"this runner does not serve {request.model}")
            caches = [self._caches[model]]
        if self._store is not None and not request.model:
            # Those of models that are no longer served, too.
            self._store.forget(request.tenant or None, request.tag or None)
        erasures = [cache.forget(request.tenant or None, request.tag or None) for cache in caches]
        outcomes = await asyncio.gather(*erasures, return_exceptions=True)
        erased: list[tuple[ModelCache, ErasedCache]] = []
        failures: list[BaseException] = []
        for cache, outcome in zip(caches, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                failures.append(outcome)
            else:
                erased.append((cache, outcome))
        _raise_what_counts(failures, some_erased=bool(erased))
        if self._store is not None:
            self._store.require_deleted()
        response = await _response(erased)
        log.info("prefix cache flushed", scope=_Scope.Name(request.scope), entries=response.entry_count)
        return response

    def _cache(self, name: str) -> ModelCache:
        return self._caches[self._model_of.get(name, name)]

    async def open(self) -> None:
        """Reads the stored prompts, before any engine starts."""
        if self._store is not None:
            await self._store.open()

    async def stored(self, model: str) -> AsyncGenerator[pb.StoredPrompts]:
        """Yields the prompts on disk that a model's engine can restore, then again after changes.

        Raises UNSUPPORTED_OPERATION if none are stored.
        """
        if self._store is None:
            raise WeftError(Reason.UNSUPPORTED_OPERATION, "this runner stores no prompts (stored_prompts_mb)")
        last = None
        async with aclosing(self._store.followers.changes()) as changes:
            async for _ in changes:
                found = self._cache(model).stored()
                if found != last:
                    last = found
                    yield found

    def end_followers(self) -> None:
        """Ends all that follow the stored prompts, because the runner is stopping."""
        if self._store is not None:
            self._store.followers.end()

    async def check_restores(self, model: CachedModel) -> None:
        """Tests whether a model's started engine continues restored prompts, once per build, files and settings."""
        if self._store is not None:
            await self._store.check(model.backend)

    async def put_away(self, model: CachedModel) -> None:
        """Stores the prompts of a model's idle engine, which ends now, for its next start."""
        if self.has(model):
            await self._caches[model.model].put_away()

    async def settle(self) -> None:
        """Waits until the prompts of ended engines are on disk."""
        if self._store is not None:
            await self._store.settle()

    async def close(self) -> None:
        """Ends the background tasks."""
        for cache in self._caches.values():
            await cache.close()
        if self._fetcher is not None:
            await self._fetcher.close()

    def _cache_of(self, model: CachedModel, state_folder: Path | None) -> ModelCache:
        if model.backend.cache_isolation is not CacheIsolation.SALT:
            return ModelCache(model, store=self._store, fetcher=self._fetcher)
        salts = SaltStore(None if state_folder is None else state_folder / f"cache-salts-{model.model}.json")
        return ModelCache(model, salts, self._store)


def _check(request: pb.FlushCacheRequest) -> None:
    if request.scope not in _FIELDS:
        raise invalid_field("scope", "must be all, model, tenant or tag")
    needed, allowed = _FIELDS[request.scope]
    for name in ("model", "tenant", "tag"):
        given = bool(getattr(request, name))
        if name in needed and not given:
            raise invalid_field(name, "must be set for this scope")
        if given and name not in allowed:
            # A caller that sets it expects a narrower scope.
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
        log.warning("engine cannot delete its cache", message=str(failure))


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
