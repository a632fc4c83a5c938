"""The backend of the runtime `ngram`: weft's own code for started servers, and the command line of this one."""

import sys

from typing_extensions import override

from runner_svc.backend.port import LoadOrder
from runner_svc.runtimes.started_server import StartedServer
from weft_ngram.parameters import PARAMETERS
from weft_ngram.settings import NgramModel


class NgramBackend(StartedServer[NgramModel]):
    """A Backend over one n-gram server."""

    engine_parameters = PARAMETERS
    command = (sys.executable, "-m", "weft_ngram.server")
    key_variable = "NGRAM_API_KEY"

    @override
    def arguments(self, order: LoadOrder, port: int) -> list[str]:
        model = self.model
        return [
            *("--text", str(model.text.expanduser()), "--order", str(model.order), "--port", str(port)),
            *("--context-tokens", str(model.slot_context_tokens), "--tokens-per-second", str(model.tokens_per_second)),
            *model.extra_arguments,
        ]
