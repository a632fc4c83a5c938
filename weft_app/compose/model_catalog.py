"""Models that can be pulled: short names and the hub's repositories, with their estimated memory in this mesh."""

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from runner_svc.memory.lease_manager import reserved_bytes
from runner_svc.memory.machine_memory import host_memory_bytes
from runner_svc.model_store.hub import FoundRepository, Hub, Repository
from runner_svc.model_store.store import ModelStore
from runner_svc.policy.memory_estimate import FileKind, KnownModel, weights_from_name
from runner_svc.policy.model_sizing import DeviceMemory, MachineMemory, SizedModel, choose_size
from runner_svc.policy.repository_files import (
    USUAL_QUANTIZATIONS,
    ModelForm,
    RepositoryFile,
    choose_files,
    gguf_models,
    names_of,
)
from weft.api.gateway.v1.model_catalog_pb2 import CatalogModel, CatalogVariant, ModelCatalog
from weft.api.registry.v1.lease_service_pb2 import HostMemory
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.models.model_source import HubSource, SourceScheme, asked_source
from weft.kernel.models.short_names import SHORT_NAMES, short_source
from weft_app.compose.home import WeftHome
from weft_app.config.config import WeftConfig

MAX_FOUND = 24
"""Maximum number of repositories of one search."""
MAX_VARIANTS = 32
"""Maximum number of quantizations per repository."""


@dataclass(frozen=True, slots=True)
class _Mesh:
    """What the mesh has: stored sources, and the memory of each machine."""

    stored: frozenset[str]
    machines: Sequence[MachineMemory]


async def mesh_catalog(
    text: str, source: str, hosts: Sequence[HostMemory], config: WeftConfig, home: WeftHome
) -> ModelCatalog:
    """Returns the models that match a text, or the quantizations of one source with exact sizes. Nothing is pulled.

    The hub is contacted for a text or a source only. A search succeeds without it; a source raises as `Hub.look_up`,
    and INVALID_ARGUMENT if it is no repository of the hub. `hosts` are the ledger's accounts.
    """
    mesh = await asyncio.to_thread(_mesh, home, hosts)
    hub = Hub(allow_http=config.model_store.allow_http)
    listed = ModelCatalog(hub=hub.endpoint)
    if source:
        asked = asked_source(short_source(source) or source, "source")
        if not isinstance(asked, HubSource) or asked.scheme is not SourceScheme.HUB:
            raise invalid_field("source", "must be a repository of the hub, such as hf:OWNER/REPO, or a short name")
        found = await asyncio.to_thread(hub.look_up, asked)
        listed.models.append(_looked_up(source, asked, found, mesh))
        return listed
    short = [(name, source) for name, source in SHORT_NAMES.items() if _has(text, name, source)]
    models = {source: _short_model(name, source, mesh) for name, source in short}
    if text:
        try:
            _add_found(models, await asyncio.to_thread(hub.search, text, MAX_FOUND), mesh)
        except WeftError as error:
            listed.hub_detail = error.message
    listed.models.extend(models.values())
    return listed


def _add_found(models: dict[str, CatalogModel], found: Sequence[FoundRepository], mesh: _Mesh) -> None:
    """Adds what the hub has to models by source; a short name's repository is not listed twice."""
    for each in found:
        variants = _variants(HubSource(repository=each.name), each.files, mesh)
        known = [models[variant.source] for variant in variants if variant.source in models]
        for model in known:
            model.context_tokens, model.downloads = each.context_tokens, each.downloads
            chosen = model.variants[0].source
            model.variants.extend(variant for variant in variants if variant.source != chosen)
        if variants and not known:
            models[each.name] = CatalogModel(
                name=each.name, context_tokens=each.context_tokens, downloads=each.downloads, variants=variants
            )


def _mesh(home: WeftHome, hosts: Sequence[HostMemory]) -> _Mesh:
    stored, _ = ModelStore(home.models).models()
    here = socket.gethostname()
    devices: dict[str, tuple[DeviceMemory, ...]] = {here: ()}
    for host in hosts:
        devices[host.host] = tuple(
            DeviceMemory(
                name=each.device.name, total_bytes=each.device.total_bytes, reserved_bytes=reserved_bytes(each)
            )
            for each in host.devices
        )
    host_bytes = host_memory_bytes()
    return _Mesh(
        stored=frozenset(model.source for model in stored),
        machines=tuple(
            # The main memory of other machines is not in the ledger.
            MachineMemory(devices=each, host_bytes=host_bytes if name == here else 0)
            for name, each in devices.items()
        ),
    )


def _has(text: str, *names: str) -> bool:
    return all(word in " ".join(names).lower() for word in text.lower().split())


def _short_model(name: str, source: str, mesh: _Mesh) -> CatalogModel:
    """Returns a short name's model, sized by the name of its repository."""
    asked = asked_source(source, "source")
    assert isinstance(asked, HubSource)
    return CatalogModel(name=name, variants=[_variant(asked, asked.wanted, 0, mesh)])


def _looked_up(name: str, asked: HubSource, found: Repository, mesh: _Mesh) -> CatalogModel:
    model = CatalogModel(name=name, context_tokens=found.context_tokens)
    model.variants.extend(_variants(asked, found.files, mesh))
    if not model.variants:
        folder = choose_files(found.files, asked.wanted, ModelForm.FOLDER, "source")
        model.variants.append(_variant(asked, "", folder.size_bytes, mesh, FileKind.SAFETENSORS))
    return model


def _variants(asked: HubSource, files: Sequence[RepositoryFile], mesh: _Mesh) -> list[CatalogVariant]:
    """Returns the GGUF models of a repository: the wanted one first, then the usual ones, then by size."""
    models = gguf_models(files)
    named = sorted(
        zip(names_of(models), models, strict=True), key=lambda pair: (_rank(pair[0], asked.wanted), pair[1].size_bytes)
    )
    return [_variant(asked, name, model.size_bytes, mesh) for name, model in named[:MAX_VARIANTS]]


def _rank(name: str, wanted: str) -> int:
    if wanted and name.lower() == wanted.lower():
        return -1
    return USUAL_QUANTIZATIONS.index(name) if name in USUAL_QUANTIZATIONS else len(USUAL_QUANTIZATIONS)


def _variant(
    asked: HubSource, wanted: str, file_bytes: int, mesh: _Mesh, kind: FileKind = FileKind.GGUF
) -> CatalogVariant:
    """Returns one quantization; `file_bytes` 0: unknown, its name may contain the size."""
    source = str(HubSource(repository=asked.repository, wanted=wanted, revision=asked.revision))
    # A name without a quantization would be taken for 16 bits per weight.
    size = file_bytes or (weights_from_name(source) if wanted else None) or 0
    variant = CatalogVariant(source=source, quantization=wanted, size_bytes=size, stored=source in mesh.stored)
    if size:
        model = SizedModel(known=KnownModel(name=source, file_bytes=size, file_kind=kind))
        outcomes = [_fit(model, machine) for machine in mesh.machines]
        variant.needed_bytes, variant.lacking_bytes = min(outcomes, key=lambda outcome: outcome[1])
    return variant


def _fit(model: SizedModel, machine: MachineMemory) -> tuple[int, int]:
    """Returns the memory that a load needs, and what the machine lacks of it."""
    try:
        chosen = choose_size(model, machine)
    except WeftError as error:
        if error.reason is not Reason.INSUFFICIENT_MEMORY:
            raise
        needed = int(error.metadata["needed_bytes"])
        return needed, max(1, needed - int(error.metadata["memory_bytes"]))
    return chosen.device_bytes + chosen.host_bytes, 0
