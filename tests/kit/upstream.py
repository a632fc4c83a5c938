"""Client of an engine's OpenAI API, for a test server."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from runner_svc.openai_upstream.client import Endpoint, OpenAiHttp
from runner_svc.policy.parameters import EngineParameters, ParameterProfile
from runner_svc.policy.timeouts import TimeoutProfile
from runner_svc.runtimes.llama_server.runtime import PARAMETERS
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason


async def _unexplained(_: Reason) -> WeftError | None:
    return None


@asynccontextmanager
async def upstream(base_url: str, engine: EngineParameters = PARAMETERS, **endpoint: Any) -> AsyncGenerator[OpenAiHttp]:
    """Opens a client of the server at `base_url`. `endpoint`: additional fields of Endpoint."""
    parameters = ParameterProfile(engine=engine)
    http = OpenAiHttp(Endpoint(base_url=base_url, parameters=parameters, **endpoint), TimeoutProfile(), _unexplained)
    try:
        yield http
    finally:
        await http.close()
