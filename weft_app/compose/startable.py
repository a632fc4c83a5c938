"""Checks before a start: whether a mesh can start with a configuration, and which models to expect."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from gateway.http.tls import server_context
from runner_svc.runner_settings import RunnerSettings
from weft.api.registry.v1 import agent_pb2
from weft.dispatch.fleet import ExpectedMesh, ModelView, expected_model
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.requests.request_values import journal_mode_of
from weft.kernel.values.address import is_loopback, split_address
from weft_app.compose.edge_certificate import checked_edge_certificate
from weft_app.compose.home import CENTRAL_SOCKET, MAX_SOCKET_PATH_BYTES, WeftHome
from weft_app.compose.published_agents import published_agents
from weft_app.compose.security import channel_security, is_on_loopback, keys_required
from weft_app.compose.service_configs import gateway_config, registry_config, router_config
from weft_app.config.config import WeftConfig
from weft_app.config.runners import with_replicas
from weft_app.edge.binary import envoy_binary


def expected_mesh(runners: Iterable[RunnerSettings]) -> ExpectedMesh:
    """Returns the models and agents that these runners will publish. Raises INVALID_ARGUMENT naming the field."""
    runners = tuple(runners)
    models = [model for runner in runners for model in _models(runner)]
    manifests = [manifest for runner in runners for manifest in published_agents(runner)]
    return ExpectedMesh(models, [agent_pb2.Agent(manifest=manifest) for manifest in manifests])


def _models(runner: RunnerSettings) -> Iterator[ModelView]:
    for model in with_replicas(runner, runner.published_models):
        journal = journal_mode_of(model.journal)
        yield expected_model(model.name, model.pool or "", runner.name, journal)
        for adapter in model.served_adapters:
            yield expected_model(adapter.name, adapter.pool or "", runner.name, journal)


def require_startable(config: WeftConfig, home: WeftHome) -> None:
    """Checks a configuration as a start does. Raises INVALID_ARGUMENT naming the invalid setting."""
    exposure = gateway_config(config).exposure()
    own = checked_edge_certificate(config, home)
    if own is None:
        server_context(exposure)
    else:
        exposure = replace(exposure, tls=own.files)
    if not is_on_loopback(exposure.host):
        exposure.require_protection()
    if config.edge.proxy == "envoy":
        envoy_binary(config.edge)
    require_announceable(config)
    _require_sockets(config, home)
    router_config(config, home.address("weft"))
    registry_config(config, home)


def _require_sockets(config: WeftConfig, home: WeftHome) -> None:
    """Raises INVALID_ARGUMENT if processes of the mesh would need API keys of each other, which callers on ports do."""
    if not keys_required(config) or channel_security(config).api_key or config.tls.certificate_file is not None:
        return
    for name in ("weft", CENTRAL_SOCKET, *(f"runner-{runner.name}" for runner in config.runners or ())):
        if not home.address(name).startswith("unix:"):
            raise invalid_field(
                "--home",
                f"the path of its socket run/{name}.sock is longer than {MAX_SOCKET_PATH_BYTES} bytes or has %, ? "
                "or #; processes of a mesh with API keys need it; choose another folder",
            )


def require_announceable(config: WeftConfig) -> None:
    """Raises INVALID_ARGUMENT if the mesh is to be announced and other machines cannot reach its relay."""
    if not config.announce.enabled:
        return
    listen = config.relay.listen
    if not listen or is_loopback(split_address(listen, "relay.listen")[0]):
        raise invalid_field(
            "announce.enabled", "needs a relay that other machines reach: add --host 0.0.0.0, or set relay.listen"
        )


def require_environments(runners: Iterable[RunnerSettings], home: WeftHome) -> None:
    """Checks that the environments of the runners' engines are installed.

    Raises INVALID_ARGUMENT naming the runner, with the command that installs what is missing.
    """
    for section in runners:
        environment = section.engine.environment
        if environment is None or section.command or not section.engine.needs_environment:
            continue
        try:
            home.environments.environment_python(environment)
        except WeftError as error:
            raise invalid_field(f"runners.{section.name}", error.message) from error
