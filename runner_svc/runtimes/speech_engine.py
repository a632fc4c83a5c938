"""The engine of a model that speaks, with the facts about it that are known before it loads."""

from collections.abc import Callable

from runner_svc.backend.port import Backend
from runner_svc.runtimes.model_engine import ModelContext, ModelEngine
from runner_svc.runtimes.speech_backend import OPERATIONS
from runner_svc.runtimes.speech_settings import SpeechSettings


def speech_engine(model: SpeechSettings, context: ModelContext, make_backend: Callable[[], Backend]) -> ModelEngine:
    """Returns the engine. It computes on the processor: it holds no memory of accelerators, and needs no lease."""
    return ModelEngine(
        make_backend=make_backend,
        operations=OPERATIONS,
        slots=model.slots,
        remote=bool(model.remote),
        timeouts=context.timeouts,
    )
