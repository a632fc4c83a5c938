"""Models, agents and routes from the wire to the domain, with every limit of what may be said of them."""

import json
import re
from collections.abc import Sequence

from google.protobuf import duration_pb2, json_format

from registry_svc.checks import require_count, require_unique, require_words
from registry_svc.mesh.behaviour_messages import to_behaviour
from registry_svc.mesh.domain import AgentManifest, Manifest, RouteManifest
from registry_svc.mesh.wakes import to_wake
from weft.api.common.v1 import sampling_pb2
from weft.api.registry.v1 import agent_pb2, model_pb2, route_pb2
from weft.dispatch.parameter_checks import check_sampling
from weft.kernel.errors import invalid_field
from weft.kernel.names import require_name
from weft.kernel.request import Operation, Skill
from weft.kernel.units import keep_alive_seconds

MAX_DESCRIPTION_CHARS = 1_024
MAX_SYSTEM_PROMPT_CHARS = 65_536
MAX_CANDIDATES = 16
MAX_BUDGET_SECONDS = 86_400.0

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def to_manifest(manifest: model_pb2.ModelManifest, field: str, *, published: bool) -> Manifest:
    """A valid model; raises INVALID_ARGUMENT naming the field. `published`: a runner says it, not an operator."""
    if manifest.pool_name:
        require_name(manifest.pool_name, f"{field}.pool_name")
    if manifest.digest and _DIGEST.fullmatch(manifest.digest) is None:
        raise invalid_field(f"{field}.digest", "must be 'sha256:' and 64 lower-case hex digits, or empty")
    return Manifest(
        name=require_name(manifest.name, f"{field}.name"),
        pool_name=manifest.pool_name,
        operations=_operations(manifest.operations, f"{field}.operations"),
        context_tokens=require_count(manifest.context_tokens, f"{field}.context_tokens"),
        digest=manifest.digest,
        remote=manifest.remote,
        wake=to_wake(manifest.wake, f"{field}.wake", published=published) if manifest.HasField("wake") else None,
        skills=_skills(manifest.skills, f"{field}.skills"),
    )


def to_agent(manifest: agent_pb2.AgentManifest, field: str) -> AgentManifest:
    """A valid agent; raises INVALID_ARGUMENT naming the field."""
    kind = manifest.WhichOneof("target")
    if kind is None:
        raise invalid_field(f"{field}.target", "must be a model or a pool")
    return AgentManifest(
        name=require_name(manifest.name, f"{field}.name"),
        target=require_name(manifest.pool if kind == "pool" else manifest.model, f"{field}.{kind}"),
        targets_pool=kind == "pool",
        description=require_words(manifest.description, f"{field}.description", MAX_DESCRIPTION_CHARS),
        system_prompt=require_words(manifest.system_prompt, f"{field}.system_prompt", MAX_SYSTEM_PROMPT_CHARS),
        default_params=_params(manifest.default_params, f"{field}.default_params"),
        behaviour=to_behaviour(manifest.behaviour, f"{field}.behaviour"),
    )


def to_route(manifest: route_pb2.RouteManifest, field: str) -> RouteManifest:
    """A valid route; raises INVALID_ARGUMENT naming the field."""
    if not 1 <= len(manifest.candidates) <= MAX_CANDIDATES:
        raise invalid_field(f"{field}.candidates", f"must be 1 to {MAX_CANDIDATES} models or pools")
    names = [require_name(each, f"{field}.candidates[{index}]") for index, each in enumerate(manifest.candidates)]
    require_unique(names, f"{field}.candidates")
    keep_alive = _seconds(manifest.keep_alive) if manifest.HasField("keep_alive") else None
    return RouteManifest(
        name=require_name(manifest.name, f"{field}.name"),
        description=require_words(manifest.description, f"{field}.description", MAX_DESCRIPTION_CHARS),
        candidates=tuple(names),
        budget_seconds=_budget(manifest.budget, f"{field}.budget") if manifest.HasField("budget") else None,
        keep_alive_seconds=None if keep_alive is None else keep_alive_seconds(keep_alive, f"{field}.keep_alive"),
        pin_primary=manifest.pin_primary,
    )


def _budget(budget: duration_pb2.Duration, field: str) -> float:
    seconds = _seconds(budget)
    if not 0 < seconds <= MAX_BUDGET_SECONDS:
        raise invalid_field(field, f"must be more than 0 and at most {MAX_BUDGET_SECONDS:.0f} s (24 h)")
    return seconds


def _seconds(length: duration_pb2.Duration) -> float:
    return length.seconds + length.nanos / 1e9


def _skills(numbers: Sequence[int], field: str) -> tuple[Skill, ...]:
    if not {skill.value for skill in Skill}.issuperset(numbers):
        raise invalid_field(field, "must name only known skills")
    return tuple(Skill(number) for number in sorted(set(numbers)))


def _operations(numbers: Sequence[int], field: str) -> tuple[Operation, ...]:
    known = {operation.value for operation in Operation}
    if not numbers or not known.issuperset(numbers):
        raise invalid_field(field, "must name at least one operation, and only known ones")
    return tuple(Operation(number) for number in sorted(set(numbers)))


def _params(params: sampling_pb2.SamplingParams, field: str) -> str:
    """Checked, and as proto JSON with sorted keys, so that equal parameters are equal texts."""
    check_sampling(params, field)
    return json.dumps(json_format.MessageToDict(params), sort_keys=True, separators=(",", ":"))
