"""The runtime openai_remote: models of a remote provider (docs/models.md)."""

from typing import TYPE_CHECKING

from runner_svc.runtimes.openai_remote.parameters import PARAMETERS
from runner_svc.runtimes.openai_remote.settings import OpenAiRemoteModel
from runner_svc.runtimes.runtime import Runtime

if TYPE_CHECKING:
    from runner_svc.runtimes.model_engine import ModelContext, ModelEngine

PROBE_INTERVAL_SECONDS = 60.0
PROBE_FAILURES = 3


def _provider_url(model: OpenAiRemoteModel, context: "ModelContext") -> str:
    from yarl import URL  # noqa: PLC0415 - see _build

    from runner_svc.openai_upstream.address import base_url, is_loopback  # noqa: PLC0415

    url = URL(base_url(model.url, f"{context.where}.url"))
    if url.scheme != "https" and not is_loopback(url.host or ""):
        raise context.refuse("url", "must be https: the key and every prompt are sent there")
    return str(url)


def _build(model: OpenAiRemoteModel, context: "ModelContext") -> "ModelEngine":
    # Imported here: only a process that serves models needs these.
    from dataclasses import replace  # noqa: PLC0415

    from runner_svc.runtimes.model_engine import ModelEngine  # noqa: PLC0415
    from runner_svc.runtimes.openai_remote.backend import OpenAiRemote, operations_of  # noqa: PLC0415
    from runner_svc.runtimes.unmanaged_server import read_key  # noqa: PLC0415
    from weft.kernel.errors import WeftError  # noqa: PLC0415

    operations = operations_of(model, context)
    if model.remote is False:
        raise context.refuse("remote", "must be true or left out: a provider is remote")
    try:
        read_key(model.api_key_env, context.environment)
    except WeftError as error:
        raise context.refuse("api_key_env", error.message) from None
    # Until an answer begins the backend itself measures; then its first token may take as long again: a provider's
    # prefill cannot be observed, so the wait for it is limited.
    timeouts = replace(
        context.timeouts,
        headers_seconds=None,
        first_token_seconds=context.timeouts.first_token_seconds or 2 * model.timeout_seconds,
    )
    provider = replace(model, url=_provider_url(model, context))
    # Providers have probes of their own, whatever those of the runner's other servers are.
    context = replace(
        context, timeouts=timeouts, probe_interval_seconds=PROBE_INTERVAL_SECONDS, probe_failures=PROBE_FAILURES
    )
    return ModelEngine(
        make_backend=lambda: OpenAiRemote(provider, context),
        operations=operations,
        slots=model.slots,
        context_tokens=model.context_tokens or 0,
        remote=True,
        timeouts=timeouts,
        requests_fail_alone=True,
    )


RUNTIME = Runtime(
    name="openai_remote",
    summary="a remote provider",
    docs="docs/models.md",
    settings=OpenAiRemoteModel,
    build=_build,
    parameters=PARAMETERS,
    starts_engines=False,
    no_output="this is a provider's model, whose output stays with the provider",
    advice={"path": "a model file is served by a runner with `runtime: llama_server`"},
)
