"""The backend of the runtime `ngram`: weft's own code for started servers, and the command line of this one."""

import os
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from runner_svc.backend.port import BackendFacts, LoadOrder
from runner_svc.openai_upstream.client import Endpoint
from runner_svc.policy.load_plan import check_parameters
from runner_svc.policy.parameters import ParameterProfile
from runner_svc.runtimes.started_server import StartedServer, StartedServerConfig
from weft.kernel.request import Operation

SERVER = (sys.executable, "-m", "weft_ngram.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramConfig(StartedServerConfig):
    """One model served by one process."""

    text: Path
    order: int
    slots: int
    context_tokens: int
    tokens_per_second: float
    extra_arguments: tuple[str, ...] = ()
    parameters: ParameterProfile

    def arguments(self, port: int) -> list[str]:
        """The command line after `command`; port 0: any free one."""
        return [
            *("--text", str(self.text), "--order", str(self.order), "--port", str(port)),
            *("--context-tokens", str(self.context_tokens), "--tokens-per-second", str(self.tokens_per_second)),
            *self.extra_arguments,
        ]


class NgramBackend(StartedServer):
    """A Backend over one n-gram server."""

    def __init__(self, config: NgramConfig) -> None:
        super().__init__(config)
        self._config = config

    @override
    async def start(self, order: LoadOrder | None = None) -> BackendFacts:
        config = self._config
        check_parameters((order or LoadOrder()).parameters, self.load_parameters)
        key = secrets.token_urlsafe(24)
        try:
            # The key travels in the environment: arguments are visible to every user of the machine.
            url = await self._listen(config.arguments, {**os.environ, "NGRAM_API_KEY": key})
            await self._connect(Endpoint(base_url=url, api_key=key, model=config.alias, parameters=config.parameters))
        except BaseException:
            await self.stop()
            raise
        return BackendFacts(
            operations=frozenset({Operation.CHAT, Operation.COMPLETION}),
            context_tokens=config.context_tokens,
            slots=config.slots,
        )
