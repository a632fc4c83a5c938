"""How much there may be."""

from collections.abc import Collection
from dataclasses import replace

from registry_svc.mesh.domain import AgentManifest, Capability, Instance, Manifest, RouteManifest
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.wake.recipes import CommandRecipe, HttpRecipe

# Size of a model, an agent or a route on the wire without its texts: numbers, times, framing.
BASE_BYTES = 96


def require_room(what: str, present: int, arriving: int, limit: int) -> None:
    """Raise TOO_MANY_RESOURCES when `present` and `arriving` of `what` exceed `limit`."""
    if arriving > 0 and present + arriving > limit:
        raise WeftError(
            Reason.TOO_MANY_RESOURCES,
            f"the mesh may have {limit} {what} and has {present}; delete some that are not needed any more",
            metadata={"resource": what, "limit": str(limit)},
        )


def model_bytes(manifest: Manifest) -> int:
    """Return the approximate size of a model in a snapshot, in bytes."""
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
    """Return the approximate size of an agent in a snapshot, in bytes."""
    texts = [manifest.name, manifest.target, manifest.description, manifest.system_prompt, manifest.default_params]
    texts += [*manifest.behaviour.tools, *manifest.behaviour.signals]
    return BASE_BYTES + _utf8_bytes(texts)


def route_bytes(manifest: RouteManifest) -> int:
    """Return the approximate size of a route in a snapshot, in bytes."""
    return BASE_BYTES + _utf8_bytes([manifest.name, manifest.description, *manifest.candidates])


def _utf8_bytes(texts: list[str]) -> int:
    return sum(len(text.encode()) for text in texts)


def detail_bytes(report: Capability) -> int:
    """Return the size of a report's texts on the wire: details of its models, and names of its tools."""
    texts = [instance.detail for instance in report.instances]
    texts += [instance.last_fault.detail for instance in report.instances if instance.last_fault is not None]
    return sum(len(text.encode()) for text in (*texts, *report.tool_names))


def kept(report: Capability, models: Collection[str], room_bytes: int) -> Capability:
    """Return a report about `models` only, without texts, and then without tools, if they exceed `room_bytes`.

    Which runner serves what must be known of every runner; the reason of a failure can also be read from the runner. A
    snapshot too large for one message would leave all routers without any of it.
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
