"""A model for tests of the cache manager."""

from dataclasses import dataclass
from pathlib import Path

from runner_svc.backend.port import Backend
from runner_svc.policy.kept_prompts import KeptPrompt
from runner_svc.policy.load_plan import AS_CONFIGURED, LoadPlan
from weft_testing.conformance.prefix_cache import MODEL


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
