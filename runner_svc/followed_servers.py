"""Servers of which a runner serves every model that they list: their lists are read again and again, and followed."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from runner_svc.instance.settings import ServedModel
from runner_svc.openai_upstream.server_probes import SHARED_AGE
from runner_svc.policy.followed_models import FollowedList, FollowedModel, ListChange
from runner_svc.policy.model_names import ServerList
from weft.api.registry.v1 import runner_pb2
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.log import get_logger
from weft.kernel.service import start_restarting, stop_tasks

MAX_LOGGED_NAMES = 16
"""Of models, in one line of the log."""

log = get_logger("weft.runner")


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedServer:
    """A server whose list of models is followed."""

    name: str
    place: str
    """Its address in one spelling (`server_place`)."""
    list_models: Callable[[float], Awaitable[ServerList]]
    """Returns what the server lists, at most so many seconds old, within a time limit. Never raises for what the server
    does."""
    serve: Callable[[FollowedModel], ServedModel]
    """Returns one of its models as it is served. Raises INVALID_ARGUMENT naming a setting."""
    most: int
    """So many of its models are served."""
    interval_seconds: float
    """Time between two looks at its list."""
    remembered: tuple[FollowedModel, ...] = ()
    """Models of an earlier run, which are served until a list says otherwise."""


class FollowingHost(Protocol):
    """What serves the models; see `RunnerService`."""

    def is_served(self, name: str) -> bool:
        """Whether a model or an adapter of this name is served."""
        ...

    async def serve(self, model: ServedModel) -> None:
        """Serves one more model."""
        ...

    async def remove(self, name: str) -> int:
        """Ends a model after its requests; returns the accelerator memory that it held, in bytes."""
        ...


class FollowedServers:
    """The servers that one runner follows."""

    def __init__(self, host: FollowingHost, clock: Clock) -> None:
        self._host = host
        self._clock = clock
        self._lists: dict[str, FollowedList] = {}
        self._places: dict[str, str] = {}
        """The addresses of the servers, by name."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._said: dict[str, str] = {}
        """The last complaint about each server, which is logged once."""
        self.on_models: Callable[[str, tuple[FollowedModel, ...]], Awaitable[None]] = _nothing
        """Called with the name of a server and its models after they have changed."""

    async def follow(self, server: FollowedServer) -> ServerList:
        """Serves what a server lists now, and follows its list from then on. Returns what it said."""
        models = self._lists[server.name] = FollowedList(server=server.name, most=server.most)
        self._places[server.name] = server.place
        models.restore(server.remembered)
        for model in server.remembered:
            await self._serve(server, models, model)
        said = await self._look(server, models, 0.0)
        self._tasks[server.name] = start_restarting(
            partial(self._run, server, models), name=f"follow-{server.name}", clock=self._clock
        )
        return said

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the servers that are followed."""
        return tuple(self._lists)

    def named_at(self, place: str) -> str:
        """Returns the name of the server that is followed at an address; empty: none is."""
        return next((name for name, each in self._places.items() if each == place), "")

    def models(self, server: str) -> tuple[FollowedModel, ...]:
        """Returns the models that are served of a server; none of one that is not followed."""
        return self._lists[server].served if server in self._lists else ()

    def listed_count(self, server: str) -> int:
        """Returns how many models a server lists; 0 of one that is not followed."""
        return self._lists[server].listed_count if server in self._lists else 0

    @property
    def counts(self) -> list[runner_pb2.FollowedServer]:
        """How many models of each server are served, of how many."""
        return [
            runner_pb2.FollowedServer(name=name, served_count=len(each.served), listed_count=each.listed_count)
            for name, each in self._lists.items()
        ]

    async def forget(self, server: str) -> None:
        """Follows a server no longer; its models are served no longer once their requests have ended."""
        task, models = self._tasks.pop(server, None), self._lists.pop(server, None)
        self._said.pop(server, None)
        self._places.pop(server, None)
        if task is not None:
            await stop_tasks([task])
        if models is not None:
            await asyncio.gather(*(self._host.remove(model.name) for model in models.served))

    def note_taken(self, names: Collection[str]) -> None:
        """Others in the mesh have these names: models that had them are served under another name soon."""
        for server, models in self._lists.items():
            for model in models.note_taken(names):
                log.warning("a model's name is taken, it gets another", server=server, model=model.name)

    async def stop(self) -> None:
        """Follows no server any more; the models stay as they are."""
        await stop_tasks(self._tasks.values())
        self._tasks.clear()

    async def _run(self, server: FollowedServer, models: FollowedList) -> None:
        while True:
            await self._clock.sleep(server.interval_seconds)
            await self._look(server, models, server.interval_seconds * SHARED_AGE)

    async def _look(self, server: FollowedServer, models: FollowedList, max_age_seconds: float) -> ServerList:
        said = await server.list_models(max_age_seconds)
        if said.models is None:
            self._complain(server.name, f"its models are not known: {said.why}")
            return said
        change = models.step(said.models.names, self._host.is_served)
        self._complain(server.name, f"{change.left_out} more models than are served" if change.left_out else "")
        await self._apply(server, models, change)
        return said

    async def _apply(self, server: FollowedServer, models: FollowedList, change: ListChange) -> None:
        if not change.added and not change.gone:
            return
        for model in change.added:
            await self._serve(server, models, model)
        await asyncio.gather(*(self._host.remove(model.name) for model in change.gone))
        log.info(
            "the models of a server have changed",
            server=server.name,
            added=[model.name for model in change.added][:MAX_LOGGED_NAMES],
            gone=[model.name for model in change.gone][:MAX_LOGGED_NAMES],
        )
        await self.on_models(server.name, models.served)

    async def _serve(self, server: FollowedServer, models: FollowedList, model: FollowedModel) -> None:
        try:
            await self._host.serve(server.serve(model))
        except WeftError as error:
            models.forget(model.upstream)
            log.error("a model of a server is not served", server=server.name, model=model.name, why=error.message)  # noqa: TRY400

    def _complain(self, server: str, what: str) -> None:
        if what and self._said.get(server) != what:
            log.warning("a server is not followed in full", server=server, why=what)
        self._said[server] = what


async def _nothing(_server: str, _models: tuple[FollowedModel, ...]) -> None:
    pass
