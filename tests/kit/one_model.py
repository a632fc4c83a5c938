"""A model for tests of the cache manager, and the suite for it."""

from dataclasses import dataclass
from pathlib import Path

from kit.engines import call_of
from runner_svc.backend.port import Backend, CacheUse, CallInfo
from runner_svc.cache.manager import CacheManager
from runner_svc.policy.kept_prompts import KeptPrompt
from runner_svc.policy.load_options import AS_CONFIGURED, LoadPlan
from weft_testing.conformance.prefix_cache import MODEL, PrefixCacheConformance


@dataclass(frozen=True)
class OneModel:
    """A model without adapters."""

    backend: Backend
    model: str = MODEL
    model_path: Path | None = None
    names: tuple[str, ...] = (MODEL,)
    digest: str = ""
    plan: LoadPlan = AS_CONFIGURED

    def expects(self, prompt: KeptPrompt) -> bool:
        return False

    def forget(self, tenant: str | None, tag: str | None) -> None:
        pass


class OneModelCache(PrefixCacheConformance):
    """The suite for the cache manager of one model."""

    def make_desk(self, backend: Backend) -> CacheManager:
        return CacheManager([OneModel(backend)])

    def make_call(self, use: CacheUse | None) -> CallInfo:
        return call_of(use)
