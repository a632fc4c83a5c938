"""The reload of one runner: its models and agents become those of its configuration, the other ones go on."""

import asyncio
from collections.abc import Callable

from runner_svc.config import RunnerConfig
from runner_svc.service import RunnerService
from runner_svc.settings import RunnerSettings
from weft.api.operations.v1 import configuration_service_pb2 as pb
from weft.kernel.log import get_logger
from weft_app.compose.configuration_service import change_messages
from weft_app.config.config import WeftConfig
from weft_app.config.reload_plan import plan_models, plan_reload
from weft_app.config.runners import with_replicas

PUBLISH_SECONDS = 10.0
"""Longest wait for the registry to forget the models that are gone, whose names others may take then."""

log = get_logger("weft_app.compose")


class RunnerReload:
    """Carries out the reloads of one runner, one after the other."""

    def __init__(
        self,
        service: RunnerService,
        section: RunnerSettings,
        build: Callable[[RunnerSettings], RunnerConfig],
        reread: Callable[[], RunnerSettings],
    ) -> None:
        """`build` returns the configuration of a section; `reread` returns the section of the file, read again."""
        self._service = service
        self._section = section
        self._build = build
        self._reread = reread

    async def reload(self, dry_run: bool) -> pb.ReloadConfigurationResponse:
        """Serves the models and agents of the file. Raises INVALID_ARGUMENT, with nothing changed.

        Other settings of the runner need a restart of its process, which the caller does: they are only returned.
        """
        section = await asyncio.to_thread(self._reread)
        plan = plan_reload(WeftConfig(), WeftConfig(), [self._section], [section])
        response = pb.ReloadConfigurationResponse(changes=change_messages(plan.changes))
        if dry_run or not plan.updated:
            return response
        built = await asyncio.to_thread(self._build, section)
        await self._carry_out(section, built, response)
        self._section = section
        return response

    async def _carry_out(
        self, section: RunnerSettings, built: RunnerConfig, response: pb.ReloadConfigurationResponse
    ) -> None:
        before = with_replicas(self._section, self._section.published_models)
        steps = plan_models(before, with_replicas(section, section.published_models))
        models = {model.name: model for model in built.models}
        for name in steps.gone:
            if holders := self._service.holders_of(name):
                requests = "1 request that runs" if holders == 1 else f"{holders} requests that run"
                response.notes.append(f"{name} is gone, and ends with {requests}")
            self._service.withdraw(name)
            log.info("model is not in the configuration any more", model=name)
        self._service.publish_agents(built.agents)
        if steps.gone and not await self._service.until_published(PUBLISH_SECONDS):
            response.notes.append(f"runner {section.name}: the registry does not answer; it learns of the change later")
        for name in steps.served:
            if words := await self._service.replace(models[name]):
                response.notes.append(words)
            log.info("model is served as the configuration has it now", model=name)
        # Whoever asks for a new model after the reload finds it.
        await self._service.until_published(PUBLISH_SECONDS)
