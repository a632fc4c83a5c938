"""Models that a runner serves because a caller requested them by source.

The runner keeps them in a file under its home and serves them again after a restart; each is loaded by its first
request.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from weakref import WeakValueDictionary

from runner_svc.added_models_file import AddedModelsFile
from runner_svc.followed_servers import (
    FollowedServer,
    FollowedServers,
    FollowingHost,
    ServerOf,
    record_models,
    server_record,
)
from runner_svc.instance.instance_settings import ServedModel
from runner_svc.policy.followed_models import FollowedModel
from runner_svc.policy.model_sizing import MachineMemory
from runner_svc.policy.repository_files import ModelForm
from weft.api.registry.v1 import runner_pb2
from weft.api.runner.v1 import added_model_pb2, load_pb2, model_store_pb2
from weft.documents.left_out import bounded, left_out
from weft.kernel.errors.error_tree import FieldError, WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.models.load_parameters import LoadParameter
from weft.kernel.models.model_source import (
    ModelSource,
    ServerSource,
    asked_source,
    server_location,
    server_source,
    shown_source,
)
from weft.kernel.telemetry.log import get_logger
from weft.kernel.values.names import require_name, require_name_of_model

MAX_REASONS = 16
MAX_ADDED_MODELS = 32
"""Maximum number of models by source on one runner, besides its configured models."""

ShowPull = Callable[[model_store_pb2.PullProgress], None]
"""Called with the progress of a pull."""
ReadMemory = Callable[[], Awaitable[MachineMemory]]
"""Returns the memory for sizing a model without configuration."""

log = get_logger("weft.runner")


async def unknown_memory() -> MachineMemory:
    """A ReadMemory for a machine with unknown memory, which sets no limits."""
    return MachineMemory()


@dataclass(frozen=True, slots=True, kw_only=True)
class AddRequest:
    """A request to add a model."""

    source: ModelSource
    name: str
    options: load_pb2.LoadOptions = field(default_factory=load_pb2.LoadOptions)
    """Options of the load that follows."""
    memory: ReadMemory = unknown_memory
    """Reads the memory for sizing."""


class ModelAdder(Protocol):
    """Creates models from sources. `weft_app.compose` implements it with the parser of `weft.yaml`."""

    async def pull(self, source: ModelSource, form: ModelForm | None, show: ShowPull) -> model_store_pb2.StoredModel:
        """Pulls a model's files into the store. Raises as `Puller.pull`."""
        ...

    async def prepare(self, request: AddRequest, show: ShowPull) -> ServedModel:
        """Returns a model with `added` set, its files pulled, and its engine and size chosen.

        Raises as `pull`, and UNSUPPORTED_OPERATION if no installed engine can load it.
        """
        ...

    def load_parameters(self, source: ModelSource) -> list[Sequence[LoadParameter]]:
        """Returns the load parameters of each engine that can serve a source, the runner's own first.

        Raises UNSUPPORTED_OPERATION if no installed engine can load it.
        """
        ...

    def restored(self, added: added_model_pb2.AddedModel) -> ServedModel:
        """Returns a model that was added earlier; missing files are pulled with its next load.

        Raises INVALID_ARGUMENT if it can no longer be served.
        """
        ...


class ModelHost(FollowingHost, Protocol):
    """Serves the models and reads the machine's memory; see `RunnerService`."""

    async def machine_memory(self) -> MachineMemory:
        """Returns the memory for sizing a model without configuration."""
        ...


class AddedModels:
    """The added models of one runner. The file must not be shared by several processes."""

    def __init__(
        self,
        adder: ModelAdder | None,
        host: ModelHost,
        file: Path,
        servers: FollowedServers,
        server_of: ServerOf | None,
        max_models: int = MAX_ADDED_MODELS,
    ) -> None:
        """`adder` None: the runner adds no models by source; `server_of` None: it attaches no servers.

        Attached servers are followed by `servers`.
        """
        self._adder = adder
        self._servers = servers
        self._server_of = server_of
        self._host = host
        self._file = AddedModelsFile(file)
        self._max_models = max_models
        self._models: dict[str, added_model_pb2.AddedModel] = {}
        """By name, including models that cannot be served at the moment."""
        self._not_served: dict[str, str] = {}
        """Why models of an earlier run are not served, by name."""
        self._write_lock = threading.Lock()
        self._adding: set[str] = set()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """One lock per name, which serializes calls for that name."""

    async def restore(self) -> None:
        """Serves the models in the file; each is loaded by its first request."""
        kept = await asyncio.to_thread(self._file.read)
        self._models |= {added.name: added for added in kept}
        self._servers.on_models = self._note_listed
        # Concurrently, so that an unresponsive server does not delay the others.
        await asyncio.gather(*(self._restore_server(each) for each in kept if each.HasField("server")))
        for added in kept:
            if added.HasField("server"):
                continue
            try:
                await self._restore_model(added)
            except WeftError as error:
                self._not_served[added.name] = error.log_message
                log.error("added model cannot be served", model=added.name, why=error.log_message)  # noqa: TRY400

    async def _restore_model(self, added: added_model_pb2.AddedModel) -> None:
        if self._host.is_served(added.name) or self._servers.is_reserved(added.name):
            raise WeftError(Reason.ALREADY_EXISTS, "the configuration has this name")
        await self._host.serve(await asyncio.to_thread(self._sources.restored, added))

    async def pull(self, source: str, form: ModelForm | None, show: ShowPull) -> model_store_pb2.StoredModel:
        """Pulls the files of a model. Raises as `ModelAdder.pull`."""
        return await self._sources.pull(asked_source(source, "source"), form, show)

    def load_parameters(self, source: str) -> list[Sequence[LoadParameter]]:
        """Returns the load parameters for a source; see `ModelAdder.load_parameters`."""
        return self._sources.load_parameters(asked_source(source, "source"))

    @property
    def servers(self) -> list[str]:
        """The names of attached servers."""
        return [name for name, added in self._models.items() if added.HasField("server")]

    @property
    def left_out(self) -> list[runner_pb2.LeftOut]:
        """The models of an earlier run that are not served."""
        return [left_out("model", name, why) for name, why in self._not_served.items()]

    @property
    def _sources(self) -> ModelAdder:
        """Raises UNSUPPORTED_OPERATION if the runner adds no models by source."""
        if self._adder is None:
            raise WeftError(
                Reason.UNSUPPORTED_OPERATION, "this runner serves only its configured models; models cannot be added"
            )
        return self._adder

    async def add(
        self, source: str, name: str, options: load_pb2.LoadOptions, show: ShowPull
    ) -> added_model_pb2.AddedModel:
        """Serves a model by source; returns it once it is saved in the file. A served model stays unchanged.

        Raises as `ModelAdder.prepare`, ALREADY_EXISTS if the name belongs to another model, TOO_MANY_RESOURCES.
        """
        server = server_source(source, "source")
        if server is not None:
            return await self._attach(server, require_name(name, "name"), options)
        request = AddRequest(
            source=asked_source(source, "source"),
            name=require_name_of_model(name, "name"),
            options=options,
            memory=self._host.machine_memory,
        )
        turn = self._turns.setdefault(name, asyncio.Lock())
        async with turn:
            earlier = self._models.get(name)
            if earlier is not None and earlier.stored_source == str(request.source) and self._host.is_served(name):
                return earlier
            if self._servers.is_reserved(name):
                raise WeftError(Reason.ALREADY_EXISTS, f"the name {name} is taken in weft.yaml; choose another name")
            if self._host.is_served(name) or (earlier is not None and earlier.HasField("server")):
                what = f"it is served from {earlier.source}" if earlier is not None else "the configuration names it"
                raise WeftError(Reason.ALREADY_EXISTS, f"the name {name} is taken: {what}; choose another name")
            self._require_room(name)
            self._adding.add(name)
            try:
                return await self._add(request, show)
            finally:
                self._adding.discard(name)

    async def _add(self, request: AddRequest, show: ShowPull) -> added_model_pb2.AddedModel:
        served = await self._sources.prepare(request, show)
        assert served.added is not None, "what is prepared says how it was added"
        await self._host.serve(served)
        self._models[request.name] = served.added
        try:
            await self._save()
        except OSError as error:
            del self._models[request.name]
            await self._host.remove(request.name)
            raise _not_kept(error) from error
        self._not_served.pop(request.name, None)
        log.info("model added", model=request.name, source=served.added.source, runtime=served.added.runtime)
        return served.added

    async def _attach(
        self, server: ServerSource, name: str, options: load_pb2.LoadOptions
    ) -> added_model_pb2.AddedModel:
        """Serves every model that a server lists; returns the server's record once it is saved in the file.

        Raises CONNECT_FAILED if it does not answer, and ALREADY_EXISTS if the name is taken.
        """
        wanted = server_record(server, name, options)
        turn = self._turns.setdefault(name, asyncio.Lock())
        async with turn:
            earlier = self._attached_at(server_location(server.url))
            if earlier is not None and earlier.name == name:
                return earlier
            if name in self._models or self._host.is_served(name):
                raise WeftError(Reason.ALREADY_EXISTS, f"the name {name} is taken; choose another name for the server")
            if earlier is not None:
                raise WeftError(Reason.ALREADY_EXISTS, f"the server is already attached, as {earlier.name}")
            self._require_room(name)
            self._adding.add(name)
            try:
                await self._follow(wanted)
                self._models[name] = wanted
                try:
                    await self._save()
                except OSError as error:
                    del self._models[name]
                    await self._servers.forget(name)
                    raise _not_kept(error) from error
                await self._servers.settle(name)
            finally:
                self._adding.discard(name)
            attached = self._as_published(wanted)
        log.info("server attached", server=name, models=len(attached.server.models))
        return attached

    def _as_published(self, added: added_model_pb2.AddedModel) -> added_model_pb2.AddedModel:
        """Returns the record of a server with what the mesh serves of it, and what it leaves out."""
        found = added_model_pb2.AddedModel()
        found.CopyFrom(added)
        if added.name in self._servers.names:
            record_models(found, self._servers.published(added.name))
            items = self._servers.left_out_of(added.name)
            found.server.left_out_count = len(items)
            found.server.left_out.extend(bounded(items))
        return found

    async def _follow(self, added: added_model_pb2.AddedModel) -> None:
        """Follows a server, and writes its models into the record.

        Raises CONNECT_FAILED if it does not list models; it is then not followed, nor after a cancellation. Raises
        ALREADY_EXISTS for a configured server with the same name or address.
        """
        if added.name in self._servers.names:
            raise WeftError(Reason.ALREADY_EXISTS, f"the configuration has a server {added.name}; choose another name")
        server = self._server(added)
        if name := self._servers.named_at(server.location):
            raise WeftError(Reason.ALREADY_EXISTS, f"the configuration already has this server, as {name}")
        is_followed = False
        try:
            said = await self._servers.follow(server)
            is_followed = said.models is not None
        finally:
            if not is_followed:
                await self._servers.forget(added.name)
        if said.models is None:
            raise WeftError(Reason.CONNECT_FAILED, f"the server is not attached: {said.why}")
        models = self._servers.models(added.name)
        record_models(added, models.served)
        added.server.listed_count = models.listed_count

    def _server(self, added: added_model_pb2.AddedModel) -> FollowedServer:
        if self._server_of is None:
            raise WeftError(Reason.UNSUPPORTED_OPERATION, "servers cannot be attached to this runner")
        return self._server_of(added)

    async def _restore_server(self, added: added_model_pb2.AddedModel) -> None:
        """Follows a server of an earlier run, even if it does not answer now. Never raises."""
        try:
            await self._servers.follow(self._server(added))
        except WeftError as error:
            log.error("attached server is not followed", server=added.name, why=error.log_message)  # noqa: TRY400

    def _attached_at(self, location: str) -> added_model_pb2.AddedModel | None:
        """Returns the server attached at an address in any spelling; None: there is none."""
        servers = (each for each in self._models.values() if each.HasField("server"))
        return next((each for each in servers if server_location(each.stored_source) == location), None)

    async def _note_listed(self, server: str, models: Sequence[FollowedModel]) -> None:
        """Saves a server's changed models, so that a restart while the server is down serves them."""
        added = self._models.get(server)
        if added is None or not added.HasField("server"):
            return
        record_models(added, models)
        try:
            await self._save()
        except OSError as error:
            log.warning("models of a server could not be stored", server=server, why=error.strerror)

    async def remove(self, name: str) -> tuple[added_model_pb2.AddedModel, int]:
        """Stops serving a model; returns it and the bytes of accelerator memory that it held.

        Raises INVALID_ARGUMENT for a configured model, and MODEL_NOT_FOUND.
        """
        turn = self._turns.setdefault(name, asyncio.Lock())
        async with turn:
            added = self._models.get(name)
            if added is None:
                if self._host.is_served(name):
                    raise invalid_field("model", f"{name} is a model of the runner's configuration; remove it there")
                raise WeftError(Reason.MODEL_NOT_FOUND, f"this runner does not serve {name}")
            del self._models[name]
            try:
                await self._save()
            except OSError as error:
                self._models[name] = added
                raise _not_kept(error) from error
            self._not_served.pop(name, None)
            if added.HasField("server"):
                await self._servers.forget(name)
                freed = 0
            else:
                freed = await self._host.remove(name)
        log.info("model removed", model=name, source=added.source)
        return shown(added), freed

    async def _save(self) -> None:
        await asyncio.to_thread(self._write)

    def _write(self) -> None:
        # The models of now: a thread that began earlier may come later.
        with self._write_lock:
            self._file.write(list(self._models.values()))

    def _require_room(self, name: str) -> None:
        if len(self._models.keys() | self._adding | {name}) > self._max_models:
            raise WeftError(
                Reason.TOO_MANY_RESOURCES,
                f"this runner already has {self._max_models} added models, its limit; remove one with weft delete "
                "model NAME",
                metadata={"limit": str(self._max_models)},
            )


def shown(added: added_model_pb2.AddedModel) -> added_model_pb2.AddedModel:
    """Returns a model for display, without the query of a URL."""
    message = added_model_pb2.AddedModel()
    message.CopyFrom(added)
    message.ClearField("stored_source")
    return message


def added_model(request: AddRequest) -> added_model_pb2.AddedModel:
    """Returns the record of a requested model."""
    return added_model_pb2.AddedModel(
        name=request.name, source=shown_source(request.source), stored_source=str(request.source)
    )


def _not_kept(error: OSError) -> WeftError:
    return FieldError("home", f"the file of added models cannot be written: {error.strerror}; nothing was changed")
