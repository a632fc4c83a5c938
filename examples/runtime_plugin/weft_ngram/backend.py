"""The backend of the runtime `ngram`: weft's own code for started servers, and the command line of this one."""

import sys

from typing_extensions import override

from runner_svc.backend.port import LoadOrder
from runner_svc.runtimes.flags import flags_of
from runner_svc.runtimes.model_engine import ModelContext, ModelEngine
from runner_svc.runtimes.started_server import StartedServer
from weft.kernel.requests.request_values import Operation
from weft_ngram.runtime import PARAMETERS, NgramModel


class NgramBackend(StartedServer[NgramModel]):
    """A Backend over one n-gram server."""

    engine_parameters = PARAMETERS
    command = (sys.executable, "-m", "weft_ngram.server")
    key_variable = "NGRAM_API_KEY"

    @override
    def arguments(self, order: LoadOrder, port: int) -> list[str]:
        model = self.model
        return [
            *("--text", str(model.text.expanduser()), "--port", str(port)),
            *("--context-tokens", str(model.slot_context_tokens), *flags_of(model, order.parameters)),
            *model.extra_arguments,
        ]


def build(model: NgramModel, context: ModelContext) -> ModelEngine:
    """Returns the engine of a model; see Runtime.build."""
    text = model.text.expanduser()
    if not text.is_file():
        raise context.refuse("text", f"there is no file {text}")
    return ModelEngine(
        make_backend=lambda: NgramBackend(model, context),
        operations=frozenset({Operation.CHAT, Operation.COMPLETION}),
        slots=model.slots,
        context_tokens=model.slot_context_tokens,
        model_path=text,
        remote=bool(model.remote),
        timeouts=context.timeouts,
    )
