"""The resources of a mesh as a watcher knows them, from the snapshot and changes of RegistryService.Watch."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.api.registry.v1 import (
    model_pb2,
    pool_pb2,
    registry_service_pb2,
    runner_pb2,
)
from weft.documents.kinds import DECLARED_KINDS, Key, record_in
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import AnyDocument, instance_of, model_document, observed_document, pool_document
from weft.kernel.values.names import is_resource_id

_DECLARED = tuple(kind for kind in DECLARED_KINDS if kind is not ResourceKind.MODEL)
_IDENTIFIED = frozenset({ResourceKind.MODEL, ResourceKind.AGENT, ResourceKind.ROUTE})


@dataclass(slots=True)
class MeshState:
    """The resources of a mesh by name, after the last applied response."""

    runners: dict[str, runner_pb2.Runner] = field(default_factory=dict)
    models: dict[str, model_pb2.Model] = field(default_factory=dict)
    declared: dict[ResourceKind, dict[str, Any]] = field(default_factory=lambda: {kind: {} for kind in _DECLARED})
    """Kinds whose records a change replaces completely, such as agents and routes, by kind and name."""
    _of_pool: dict[str, set[str]] = field(default_factory=dict)
    """Model names by pool."""
    _of_runner: dict[str, set[str]] = field(default_factory=dict)
    """Model names by runner."""

    def fold(self, response: registry_service_pb2.WatchResponse) -> frozenset[Key]:
        """Applies a snapshot or a change; returns the resources that may have changed or disappeared."""
        if response.WhichOneof("kind") == "snapshot":
            before = set(self.keys())
            self._replace(response.snapshot)
            return frozenset(before | set(self.keys()))
        return frozenset(self._change(response.change))

    def keys(self) -> Iterator[Key]:
        """Yields every resource."""
        yield from ((kind, name) for kind in ResourceKind for name in self._known(kind))

    def __contains__(self, key: Key) -> bool:
        """Whether there is a resource of this kind and name."""
        return key[1] in self._known(key[0])

    def names(self, kind: ResourceKind) -> list[str]:
        """Returns the names of one kind, sorted."""
        return sorted(self._known(kind))

    def _known(self, kind: ResourceKind) -> Mapping[str, Any]:
        others: Mapping[ResourceKind, Mapping[str, Any]] = {
            ResourceKind.RUNNER: self.runners,
            ResourceKind.MODEL: self.models,
            ResourceKind.POOL: self._of_pool,
        }
        return others[kind] if kind in others else self.declared[kind]

    def document(self, key: Key) -> AnyDocument | None:
        """Returns the current document of a resource by name or id; None: it does not exist."""
        kind, name = key[0], self._name_of(*key)
        if kind is ResourceKind.POOL:
            members = [self.models[member] for member in self._of_pool.get(name, ())]
            return pool_document(pool_message(name, members)) if members else None
        if kind is ResourceKind.MODEL:
            model = self.models.get(name)
            runner = None if model is None else self.runners.get(model.runner)
            return None if model is None else model_document(model, instance_of(model, runner))
        message = self._known(kind).get(name)
        return None if message is None else observed_document(kind, message)

    def _name_of(self, kind: ResourceKind, text: str) -> str:
        """Resolves an id to a name; returns any other text unchanged."""
        if not is_resource_id(text):
            return text
        known = self._known(kind) if kind in _IDENTIFIED else {}
        return next((name for name, message in known.items() if message.id == text), text)

    def documents(self, kind: ResourceKind) -> list[AnyDocument]:
        """Returns the resources of one kind, by name."""
        documents = (self.document((kind, name)) for name in self.names(kind))
        return [document for document in documents if document is not None]

    def _replace(self, snapshot: registry_service_pb2.Snapshot) -> None:
        self.runners = {watched.runner.name: watched.runner for watched in snapshot.runners}
        self.declared = {kind: {} for kind in _DECLARED}
        self.models, self._of_pool, self._of_runner = {}, {}, {}
        for resource in snapshot.resources:
            record = record_in(resource)
            if isinstance(record, model_pb2.Model):
                self._put(record)
            elif record is not None:
                self.declared[ResourceKind(resource.kind)][resource.name] = record

    def _change(self, change: registry_service_pb2.Change) -> Iterator[Key]:
        match change.WhichOneof("kind"):
            case "runner":
                runner = change.runner.runner
                self.runners[runner.name] = runner
                yield from self._runner_keys(runner.name)
            case "deleted_runner":
                self.runners.pop(change.deleted_runner, None)
                yield from self._runner_keys(change.deleted_runner)
            case "resource" if (record := record_in(change.resource)) is not None:
                kind, name = ResourceKind(change.resource.kind), change.resource.name
                if isinstance(record, model_pb2.Model):
                    yield from _model_keys(name, self._drop(name), record)
                    self._put(record)
                else:
                    self.declared[kind][name] = record
                    yield kind, name
            case "deleted_resource" if change.deleted_resource.kind in DECLARED_KINDS:
                kind, name = ResourceKind(change.deleted_resource.kind), change.deleted_resource.name
                if kind is ResourceKind.MODEL:
                    yield from _model_keys(name, self._drop(name))
                else:
                    self.declared[kind].pop(name, None)
                    yield kind, name

    def _runner_keys(self, name: str) -> Iterator[Key]:
        """Yields a runner and its models, because it reports their instances."""
        yield ResourceKind.RUNNER, name
        yield from ((ResourceKind.MODEL, model) for model in self._of_runner.get(name, ()))

    def _put(self, model: model_pb2.Model) -> None:
        name = model.manifest.name
        self.models[name] = model
        self._of_pool.setdefault(pool_of(model), set()).add(name)
        if model.runner:
            self._of_runner.setdefault(model.runner, set()).add(name)

    def _drop(self, name: str) -> model_pb2.Model | None:
        """Removes and returns a model."""
        model = self.models.pop(name, None)
        if model is not None:
            _discard(self._of_pool, pool_of(model), name)
            _discard(self._of_runner, model.runner, name)
        return model


def pool_of(model: model_pb2.Model) -> str:
    """Returns the pool of a model."""
    return model.manifest.pool_name or model.manifest.name


def pool_message(name: str, members: Iterable[model_pb2.Model]) -> pool_pb2.Pool:
    """Returns the message of a pool of these models."""
    ordered = sorted(members, key=lambda model: model.manifest.name)
    return pool_pb2.Pool(
        name=name,
        explicit=any(model.manifest.pool_name for model in ordered),
        members=ordered,
        size=len(ordered),
        active_count=sum(model.status == model_pb2.Model.STATUS_ACTIVE for model in ordered),
    )


def _model_keys(name: str, *versions: model_pb2.Model | None) -> Iterator[Key]:
    """Yields the keys of a model and of its current and previous pools."""
    yield ResourceKind.MODEL, name
    yield from ((ResourceKind.POOL, pool_of(model)) for model in versions if model is not None)


def _discard(index: dict[str, set[str]], key: str, name: str) -> None:
    names = index.get(key, set())
    names.discard(name)
    if not names:
        index.pop(key, None)
