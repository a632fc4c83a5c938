"""Servers that a runner follows: each model in a server's list is parsed like a model of weft.yaml."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from runner_svc.followed_servers import FollowedServer, remembered_of
from runner_svc.instance.instance_settings import ServedModel
from runner_svc.openai_upstream.server_probes import ServerProbes
from runner_svc.policy.followed_models import FollowedModel
from runner_svc.policy.model_names import ServerList
from runner_svc.runner_settings import RunnerSettings
from runner_svc.runtimes.runtime_settings import ModelSettings
from runner_svc.runtimes.table import ATTACHED_RUNTIME
from weft.api.runner.v1 import added_model_pb2
from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.models.load_parameters import API_KEY_ENV
from weft.kernel.models.model_source import server_location
from weft_app.compose.added_models import BuildModel
from weft_app.config.loader import parse_section
from weft_app.config.runners import ConfiguredRunner

LIST_SECONDS = 5.0
KEY_VARIABLE_PREFIX = "WEFT_KEY_"
"""Beginning of the variables that requests may name without being listed in weft.yaml."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """How to reach a running server."""

    name: str
    url: str = field(repr=False)
    api_key_env: str | None = None
    remote: bool | None = None


def configured_servers(
    section: RunnerSettings,
    build: BuildModel,
    probes: ServerProbes | None = None,
) -> tuple[FollowedServer, ...]:
    """Returns the server that a runner's section follows, if any. Raises INVALID_ARGUMENT naming a setting."""
    if not section.follows_server or section.url is None:
        return ()
    address = ServerAddress(name=section.name, url=section.url, api_key_env=section.api_key_env, remote=section.remote)
    return (followed_server(section, address, f"runners.{section.name}", build, os.environ, probes),)


async def list_of_followed(section: RunnerSettings) -> ServerList | None:
    """Returns the current list of the server that a runner follows; None: it follows none.

    Raises INVALID_ARGUMENT naming a setting.
    """
    servers = configured_servers(section, _serves_nothing)
    return await servers[0].list_models(0.0) if servers else None


def why_none_served(found: ServerList) -> str:
    """Returns a text that says why a runner serves no model of its server, and what to do."""
    if found.models is None:
        return f"serves no model of its server: {found.why}; {found.remedy}"
    if not found.models.names:
        return "its server lists no models; what it lists later is served"
    return "serves none of the models of its server yet; weft logs says why"


def _serves_nothing(section: RunnerSettings, model: ModelSettings) -> ServedModel:
    raise AssertionError(f"a list is read, nothing served: {section.name} {model.name}")


def attached_server(
    section: RunnerSettings, build: BuildModel, probes: ServerProbes, added: added_model_pb2.AddedModel
) -> FollowedServer:
    """Builds a server attached to a configured runner.

    Raises INVALID_ARGUMENT naming what is wrong with its record, PERMISSION_DENIED for a variable that the
    configuration does not give to requests.
    """
    server = added.server
    variable = server.api_key_env
    if variable and not variable.startswith(KEY_VARIABLE_PREFIX) and variable not in section.key_variables:
        raise FieldError(
            f"options.parameters.{API_KEY_ENV}",
            f"requests may not name the variable {variable}: list it in key_variables of the runner {section.name} in "
            f"weft.yaml, or use one that begins with {KEY_VARIABLE_PREFIX}",
            Reason.PERMISSION_DENIED,
        )
    address = ServerAddress(
        name=added.name,
        url=added.stored_source,
        api_key_env=variable or None,
        remote=server.remote if server.HasField("remote") else None,
    )
    found = followed_server(section, address, "server", build, probes=probes)
    return replace(found, remembered=remembered_of(added))


def followed_server(
    section: RunnerSettings,
    address: ServerAddress,
    where: str,
    build: BuildModel,
    environment: Mapping[str, str] = os.environ,
    probes: ServerProbes | None = None,
) -> FollowedServer:
    """Builds a followed server. Its models share `probes`.

    Raises INVALID_ARGUMENT naming a setting, prefixed with `where`.
    """
    # Imported here: only processes that follow a server need an HTTP client.
    from runner_svc.openai_upstream.address import base_url, require_known_location, server_root  # noqa: PLC0415
    from runner_svc.openai_upstream.probe import list_of, probe  # noqa: PLC0415
    from runner_svc.runtimes.unmanaged_server import read_key  # noqa: PLC0415

    require_known_location(base_url(address.url, f"{where}.url"), remote=address.remote, field=f"{where}.remote")
    root = server_root(address.url)

    shared = probes or ServerProbes()

    async def list_models(max_age_seconds: float) -> ServerList:
        try:
            key = read_key(address.api_key_env, environment)
        except WeftError as error:
            return ServerList(models=None, why=error.message, remedy="set it, or correct api_key_env")

        return list_of(await shared.latest(root, key, max_age_seconds, lambda: probe(root, LIST_SECONDS, key)))

    def serve(model: FollowedModel) -> ServedModel:
        runner = {"name": section.name, "runtime": ATTACHED_RUNTIME, "models": [_document(address, model)]}
        (settings,) = parse_section(ConfiguredRunner, runner).models
        # The runner's engine settings in weft.yaml are for its own runtime.
        own = replace(section, runtime=ATTACHED_RUNTIME, command=None, url=None, models=(settings,))
        return replace(build(own, settings), server=address.name)

    return FollowedServer(
        name=address.name,
        location=server_location(address.url),
        list_models=list_models,
        serve=serve,
        most=section.max_listed_models,
        interval_seconds=section.probe_interval_seconds,
    )


def _document(address: ServerAddress, model: FollowedModel) -> dict[str, Any]:
    """Returns a server's model in the form of weft.yaml."""
    document: dict[str, Any] = {"name": model.name, "url": address.url, "upstream_model": model.upstream}
    if address.api_key_env is not None:
        document["api_key_env"] = address.api_key_env
    if address.remote is not None:
        document["remote"] = address.remote
    return document
