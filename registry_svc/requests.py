"""From the wire to the domain: every limit of what a caller may send, and the field it is about."""

import base64
import binascii
import math
import re
from collections.abc import Sequence

from registry_svc.config import RegistryConfig
from registry_svc.domain import Capability, Heartbeat, Instance, Manifest, Opening, Phase, RunnerProfile
from weft.api.registry.v1 import model_pb2, registry_service_pb2, runner_pb2, runner_session_service_pb2
from weft.kernel.errors import invalid_field
from weft.kernel.names import MAX_NAME_CHARS, MAX_REQUEST_ID_CHARS, is_name, require_name, require_token
from weft.kernel.request import Operation

MAX_ID_CHARS = 128
MAX_ADDRESS_CHARS = 512
MAX_HOST_CHARS = 255
MAX_DETAIL_CHARS = 4096
DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def to_opening(request: runner_session_service_pb2.OpenSessionRequest, config: RegistryConfig) -> Opening:
    """A valid OpenSession; raises INVALID_ARGUMENT naming the field."""
    if len(request.models) > config.max_models_per_session:
        raise invalid_field("models", f"at most {config.max_models_per_session} models per runner")
    models = tuple(_manifest(manifest, f"models[{index}]") for index, manifest in enumerate(request.models))
    _require_unique([manifest.name for manifest in models], "models", "name")
    if request.session_id:
        require_token(request.session_id, "session_id", MAX_ID_CHARS)
    return Opening(
        request_id=require_token(request.request_id, "request_id", MAX_REQUEST_ID_CHARS),
        session_id=request.session_id,
        profile=_profile(request.runner),
        capability=_capability(request.runner.capability, "runner.capability", config),
        models=models,
    )


def to_heartbeat(request: runner_session_service_pb2.HeartbeatRequest, config: RegistryConfig) -> Heartbeat:
    """A valid Heartbeat; raises INVALID_ARGUMENT naming the field."""
    _require_count(request.sequence, "sequence")
    has_report = request.HasField("capability")
    return Heartbeat(
        session_id=require_token(request.session_id, "session_id", MAX_ID_CHARS),
        incarnation=require_token(request.incarnation, "incarnation", MAX_ID_CHARS),
        sequence=request.sequence,
        capability=_capability(request.capability, "capability", config) if has_report else None,
    )


def page_of(
    request: registry_service_pb2.ListModelsRequest | registry_service_pb2.ListRunnersRequest,
) -> tuple[str, int]:
    """The name after which the page begins, and how many it holds; raises INVALID_ARGUMENT naming the field."""
    if request.page_size < 0:
        raise invalid_field("page_size", "must not be negative")
    size = min(request.page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
    if not request.page_token:
        return "", size
    try:
        after = base64.b64decode(request.page_token, altchars=b"-_", validate=True).decode("ascii")
    except (binascii.Error, ValueError):
        after = ""
    if not is_name(after):
        raise invalid_field("page_token", "must be one that an earlier page returned")
    return after, size


def page_token(last_name: str) -> str:
    """The token of the page that begins after `last_name`."""
    return base64.urlsafe_b64encode(last_name.encode("ascii")).decode("ascii")


def _profile(runner: runner_pb2.Runner) -> RunnerProfile:
    if not runner.address:
        raise invalid_field("runner.address", "must not be empty")
    return RunnerProfile(
        name=require_name(runner.name, "runner.name"),
        incarnation=require_token(runner.incarnation, "runner.incarnation", MAX_ID_CHARS),
        address=_text(runner.address, "runner.address", MAX_ADDRESS_CHARS),
        host=_text(runner.host, "runner.host", MAX_HOST_CHARS),
        runtime=_text(runner.runtime, "runner.runtime", MAX_NAME_CHARS),
        version=_text(runner.version, "runner.version", MAX_NAME_CHARS),
    )


def _manifest(manifest: model_pb2.ModelManifest, field: str) -> Manifest:
    if manifest.pool_name:
        require_name(manifest.pool_name, f"{field}.pool_name")
    if manifest.digest and _DIGEST.fullmatch(manifest.digest) is None:
        raise invalid_field(f"{field}.digest", "must be 'sha256:' and 64 lower-case hex digits, or empty")
    return Manifest(
        name=require_name(manifest.name, f"{field}.name"),
        pool_name=manifest.pool_name,
        operations=_operations(manifest.operations, f"{field}.operations"),
        context_tokens=_require_count(manifest.context_tokens, f"{field}.context_tokens"),
        digest=manifest.digest,
        remote=manifest.remote,
    )


def _operations(numbers: Sequence[int], field: str) -> tuple[Operation, ...]:
    known = {operation.value for operation in Operation}
    if not numbers or not known.issuperset(numbers):
        raise invalid_field(field, "must name at least one operation, and only known ones")
    return tuple(Operation(number) for number in sorted(set(numbers)))


def _capability(capability: runner_pb2.Capability, field: str, config: RegistryConfig) -> Capability:
    if len(capability.instances) > config.max_models_per_session:
        raise invalid_field(f"{field}.instances", f"at most {config.max_models_per_session}, one per model")
    instances = tuple(_instance(state, f"{field}.instances[{i}]") for i, state in enumerate(capability.instances))
    _require_unique([instance.model for instance in instances], f"{field}.instances", "model")
    return Capability(instances=instances, draining=capability.draining)


def _instance(state: runner_pb2.InstanceState, field: str) -> Instance:
    if state.phase not in {phase.value for phase in Phase}:
        raise invalid_field(f"{field}.phase", "must be a known phase")
    progress = state.load_progress if state.HasField("load_progress") else None
    if progress is not None and (math.isnan(progress) or not 0.0 <= progress <= 1.0):
        raise invalid_field(f"{field}.load_progress", "must be from 0 to 1")
    return Instance(
        model=require_name(state.model, f"{field}.model"),
        phase=Phase(state.phase),
        slots_total=_require_count(state.slots_total, f"{field}.slots_total"),
        slots_used=_require_count(state.slots_used, f"{field}.slots_used"),
        load_progress=progress,
        context_tokens=_require_count(state.context_tokens, f"{field}.context_tokens"),
        detail=_words(state.detail, f"{field}.detail"),
    )


def _text(text: str, field: str, max_chars: int) -> str:
    if len(text) > max_chars or not text.isprintable():
        raise invalid_field(
            field, f"must be at most {max_chars} characters, without line breaks and control characters"
        )
    return text


def _words(text: str, field: str) -> str:
    if len(text) > MAX_DETAIL_CHARS:
        raise invalid_field(field, f"must be at most {MAX_DETAIL_CHARS} characters")
    return text


def _require_count(number: int, field: str) -> int:
    if number < 0:
        raise invalid_field(field, "must not be negative")
    return number


def _require_unique(names: Sequence[str], field: str, member: str) -> None:
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:
            raise invalid_field(f"{field}[{index}].{member}", "must not appear twice")
        seen.add(name)
