"""The reload of a mesh: reads weft.yaml and applies the changes while everything else continues."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import grpc

from gateway.gateway_service import GatewayService
from registry_svc.registry_service import RegistryService
from router_svc.router_service import RouterService
from runner_svc.runner_settings import RunnerSettings
from weft.api.operations.v1 import configuration_service_pb2 as pb
from weft.dispatch.fleet import ExpectedMesh, FleetView, FleetWatcher
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock
from weft_app.compose.configuration import ConfigurationSource, ReadConfiguration, write_snapshot
from weft_app.compose.edge_certificate import with_edge_certificate
from weft_app.compose.home import WeftHome
from weft_app.compose.mesh_runners import MeshRunners
from weft_app.compose.runner_processes import left_behind_notes, retire_others
from weft_app.compose.service_configs import gateway_config_behind_edge, registry_config, router_config
from weft_app.compose.startable import expected_mesh, require_environments, require_startable
from weft_app.config.config import CONFIG_NAME, WeftConfig
from weft_app.config.reload_plan import ReloadPlan, plan_reload
from weft_app.config.runners import with_engines

START_SECONDS = 60.0
"""Timeout for the start of a runner; requests for its models wait that long, too."""
START_CHECK_SECONDS = 0.1

log = get_logger("weft_app.compose")


@dataclass(slots=True, kw_only=True)
class MeshReload:
    """Reloads a running mesh. The caller must not run two reloads concurrently."""

    source: ConfigurationSource
    current: ReadConfiguration
    changed: Callable[[ReadConfiguration], None]
    """Called with the configuration that a reload puts in force."""
    home: WeftHome
    config_file: Path
    runners: MeshRunners
    registry: grpc.aio.Channel
    names: RegistryService
    fleet: FleetWatcher
    router: RouterService
    edge: GatewayService
    expected: ExpectedMesh
    """Models and agents that the gateway shows before they are published."""
    names_waited_for: Callable[[], Awaitable[Collection[str]]]
    """Returns the names of models and pools for which tasks wait."""
    clock: Clock

    async def reload(self, dry_run: bool) -> pb.ReloadConfigurationResponse:
        """Reads the configuration and applies the changes; `dry_run` only returns them.

        Raises INVALID_ARGUMENT and MALFORMED_REQUEST, listing every problem, without a change.
        """
        read = await asyncio.to_thread(self.source.read)
        current = self.current
        _require_file(current, read)
        plan = plan_reload(current.config, read.config, current.runners, read.runners)
        wanted = read
        if plan.waiting_settings:
            wanted = await asyncio.to_thread(self.source.with_values_of, read, current, plan.waiting_settings)
        await asyncio.to_thread(self._check, wanted, plan)
        response = pb.ReloadConfigurationResponse(files=map(str, read.files), changes=plan.changes)
        left_behind = await asyncio.to_thread(left_behind_notes, self.home, {each.name for each in wanted.runners})
        response.notes.extend(left_behind[runner] for runner in plan.stopped if runner in left_behind)
        if dry_run:
            response.notes.extend(await self._replacements(wanted, plan))
            return response
        # Whatever may fail comes first: a reload after this one sees only what this one did not put in force.
        live = await asyncio.to_thread(with_edge_certificate, wanted.config, self.home) if plan.live_settings else None
        # In force from here on: a runner that dies restarts with it.
        await asyncio.to_thread(write_snapshot, self.config_file, wanted.document)
        self.changed(wanted)
        self.current = wanted
        if live is not None:
            self._take_settings(wanted.config, live)
        touched = {*plan.restarted, *plan.updated}
        refused = [each.name for each in wanted.runners if each.name not in touched and self._is_refused(each.name)]
        response.notes.extend(f"runner {name} did not start, and is started again" for name in refused)
        if plan.changes or refused:
            await self._carry_out(plan, refused, wanted, response)
            log.info("configuration reloaded", changes=len(plan.changes), waiting=list(plan.waiting_settings))
        return response

    def _check(self, wanted: ReadConfiguration, plan: ReloadPlan) -> None:
        """Checks what would otherwise fail later in a runner. Raises INVALID_ARGUMENT naming the setting."""
        # `weft up` does not import the code of runners before the first reload.
        from weft_app.compose.runner import runner_config  # noqa: PLC0415

        require_startable(wanted.config, self.home)
        expected_mesh(wanted.runners)
        touched = {*plan.started, *plan.restarted, *plan.updated}
        sections = [runner for runner in wanted.runners if runner.name in touched]
        disabled = wanted.config.extensions.disabled
        require_environments(with_engines(sections, disabled), self.home)
        for section in sections:
            runner_config(section, self.home, address="", registry_address="", disabled=disabled)
        _require_free_names(sections, self.fleet.view, {runner.name for runner in self.current.runners})

    async def _replacements(self, wanted: ReadConfiguration, plan: ReloadPlan) -> list[str]:
        """Returns for each model to reload a sentence that says whether it loads beside the old one or after it."""
        from weft_app.compose.replacement_forecast import replacement_forecast  # noqa: PLC0415 - see _check
        from weft_app.compose.runner import runner_config  # noqa: PLC0415

        sections = {runner.name: runner for runner in wanted.runners}
        found: list[str] = []
        for runner in plan.updated:
            names = plan.reloaded_models(runner)
            config = await asyncio.to_thread(
                runner_config, sections[runner], self.home, address="", registry_address=""
            )
            for model in config.models:
                if model.name in names:
                    view = self.fleet.view
                    found.append(await replacement_forecast(config, model, view, self.registry))
        return found

    def _is_refused(self, runner: str) -> bool:
        """Whether a runner does not start. The cause may have been corrected outside of the configuration."""
        known = self.fleet.view.runners.get(runner)
        return bool(self.runners.refusal(runner)) and (known is None or not known.active)

    async def _carry_out(
        self,
        plan: ReloadPlan,
        refused: Collection[str],
        wanted: ReadConfiguration,
        response: pb.ReloadConfigurationResponse,
    ) -> None:
        sections = {runner.name: runner for runner in wanted.runners}
        grace = wanted.config.drain_seconds
        await asyncio.gather(*(self.runners.stop(name, grace) for name in plan.stopped))
        response.notes.extend(await retire_others(self.home, sections, self.registry, self.names_waited_for))
        await asyncio.gather(
            *(self._restart(sections[name], grace, response) for name in (*plan.restarted, *refused)),
            *(self._update(sections[name], grace, response) for name in plan.updated),
        )
        await asyncio.gather(*(self._start(sections[name], response) for name in plan.started))

    def _take_settings(self, config: WeftConfig, with_certificate: WeftConfig) -> None:
        self.edge.reconfigure(gateway_config_behind_edge(with_certificate))
        self.router.reconfigure(router_config(config, ""))
        self.names.reconfigure(registry_config(config, self.home))

    async def _restart(self, section: RunnerSettings, grace: float, response: pb.ReloadConfigurationResponse) -> None:
        await self.runners.stop(section.name, grace)
        await self._start(section, response)

    async def _update(self, section: RunnerSettings, grace: float, response: pb.ReloadConfigurationResponse) -> None:
        """Reloads the models of a runner, or restarts it if it cannot."""
        known = self.fleet.view.runners.get(section.name)
        try:
            if known is None or not known.active:
                raise invalid_field("runner", "is not there")
            answer = await self.runners.reload(known.address)
        except WeftError as error:
            log.warning("runner is restarted for its models", runner=section.name, why=error.message)
            response.notes.append(f"runner {section.name} is restarted: {error.message}")
            await self._restart(section, grace, response)
            return
        response.notes.extend(answer.notes)

    async def _start(self, section: RunnerSettings, response: pb.ReloadConfigurationResponse) -> None:
        """Starts a runner and waits until it is active; requests for its models wait meanwhile."""
        # Separate objects: the router and the gateway see models arrive at different times.
        for_router, for_gateway = expected_mesh([section]), expected_mesh([section])
        self.router.expect(for_router)
        self.expected.add(for_gateway)
        try:
            await self.runners.start(section)
            why = await self._why_absent(section.name)
        finally:
            self.router.expect_not(for_router)
            self.expected.drop(for_gateway)
        if why:
            response.notes.append(f"runner {section.name} {why}")
            for change in response.changes:
                if section.name in (change.runner, change.name):
                    change.error = why

    async def _why_absent(self, runner: str) -> str:
        """Returns why a started runner is not active; empty if it is."""
        deadline = self.clock.monotonic() + START_SECONDS
        while self.clock.monotonic() < deadline:
            known = self.fleet.view.runners.get(runner)
            if known is not None and known.active:
                return ""
            if refusal := self.runners.refusal(runner):
                return f"does not start: {refusal}"
            await self.clock.sleep(START_CHECK_SECONDS)
        return f"has not come within {START_SECONDS:.0f} s; it continues to start, see its log"


def _require_file(current: ReadConfiguration, read: ReadConfiguration) -> None:
    """Raises INVALID_ARGUMENT for a missing or empty file: an editor may be writing it."""
    if current.document and not read.document:
        (*_, file) = current.files or (Path(CONFIG_NAME),)
        what = "is empty" if read.files else "is not there any more"
        raise invalid_field("--config", f"{file} {what}; to serve without a configuration, stop the mesh and start it")


def _require_free_names(sections: Iterable[RunnerSettings], view: FleetView, own: Collection[str]) -> None:
    """Raises INVALID_ARGUMENT if a runner elsewhere has the name of a runner or a model."""
    for section in sections:
        other = view.runners.get(section.name)
        if section.name not in own and other is not None and other.active:
            raise invalid_field(f"runners.{section.name}", "another runner of the mesh has this name; choose another")
        for model in section.published_models:
            known = view.models.get(model.name)
            if known is not None and known.runner and known.runner not in own and known.runner != section.name:
                holder = view.runners.get(known.runner)
                if holder is not None and holder.active:
                    raise invalid_field(
                        f"runners.{section.name}.models.{model.name}",
                        f"the runner {known.runner} has a model of this name; choose another",
                    )
