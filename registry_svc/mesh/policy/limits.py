"""How much there may be."""

from collections.abc import Collection
from dataclasses import replace

from registry_svc.mesh.domain import AgentManifest, Capability, Instance, Manifest, RouteManifest
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.wake.recipes import CommandRecipe, HttpRecipe

# What a model, an agent or a route takes on the wire besides its texts: numbers, times, the framing of fields.
BASE_BYTES = 96


def require_room(what: str, present: int, arriving: int, limit: int) -> None:
    """Raise TOO_MANY_RESOURCES when `arriving` more of `what` would be more than `limit`."""
    if arriving > 0 and present + arriving > limit:
        raise WeftError(
            Reason.TOO_MANY_RESOURCES,
            f"the mesh may have {limit} {what} and has {present}; delete some that are not needed any more",
            metadata={"resource": what, "limit": str(limit)},
        )


def model_bytes(manifest: Manifest) -> int:
    """About how many bytes a model takes in a snapshot of the mesh."""
    texts = [manifest.name, manifest.pool_name, manifest.digest]
    match manifest.wake.by_mesh if manifest.wake is not None else None:
        case HttpRecipe(url=url, headers=headers):
            texts += [url, *headers.keys(), *headers.values()]
        case CommandRecipe(argv=argv):
            texts += argv
        case _:
            pass
    return BASE_BYTES + _utf8_bytes(texts)


def agent_bytes(manifest: AgentManifest) -> int:
    """About how many bytes an agent takes in a snapshot of the mesh."""
    texts = [manifest.name, manifest.target, manifest.description, manifest.system_prompt, manifest.default_params]
    texts += [*manifest.behaviour.tools, *manifest.behaviour.signals]
    return BASE_BYTES + _utf8_bytes(texts)


def route_bytes(manifest: RouteManifest) -> int:
    """About how many bytes a route takes in a snapshot of the mesh."""
    return BASE_BYTES + _utf8_bytes([manifest.name, manifest.description, *manifest.candidates])


def _utf8_bytes(texts: list[str]) -> int:
    return sum(len(text.encode()) for text in texts)


def detail_bytes(report: Capability) -> int:
    """How much the words of a report take on the wire: those about its models, and the names of its tools."""
    words = [instance.detail for instance in report.instances]
    words += [instance.last_fault.detail for instance in report.instances if instance.last_fault is not None]
    return sum(len(text.encode()) for text in (*words, *report.tool_names))


def kept(report: Capability, models: Collection[str], room_bytes: int) -> Capability:
    """A report of `models` alone, without its words where those are more than `room_bytes`, if need be without tools.

    Who serves what must be known of every runner; why a backend failed can also be asked of the runner itself. A
    snapshot that is too large for one message would leave all routers without any of it.
    """
    instances = tuple(instance for instance in report.instances if instance.model in models)
    whole = replace(report, instances=instances)
    if detail_bytes(whole) <= room_bytes:
        return whole
    wordless = replace(report, instances=tuple(map(_wordless, instances)))
    return wordless if detail_bytes(wordless) <= room_bytes else replace(wordless, tool_names=())


def _wordless(instance: Instance) -> Instance:
    fault = instance.last_fault
    return replace(instance, detail="", last_fault=None if fault is None else replace(fault, detail=""))
