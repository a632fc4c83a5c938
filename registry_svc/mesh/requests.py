"""Validation of requests, and the canonical form of reports and declarations: equal meanings are equal messages.

Field rules (`weft.kernel.schemas.field_rules`) check single values, modules of `weft.documents.kinds` several fields;
this module checks several documents and the registry's limits. Unknown fields of newer callers are dropped. Each
`valid_*` changes the message in place.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from datetime import UTC

from registry_svc.mesh.leave_out import DECLARE_OTHERS, clear_invalid, drop_recipe, keep_valid
from registry_svc.mesh.records import to_kind
from registry_svc.registry_config import RegistryConfig
from registry_svc.wire_values import (
    read_page_token,
    require_at_most,
    require_count,
    without_control_characters,
)
from weft.api.registry.v1 import agent_pb2, declaration_service_pb2, model_pb2, runner_pb2
from weft.api.registry.v1 import registry_service_pb2 as pb
from weft.api.registry.v1 import runner_session_service_pb2 as session_pb
from weft.api.registry.v1.resource_pb2 import ResourceDocument
from weft.api.registry.v1.runner_pb2 import LeftOut
from weft.documents.kinds import DECLARED_KINDS, KINDS
from weft.documents.kinds.agent import check_agent
from weft.documents.kinds.model import check_manifest
from weft.documents.reach import needed_access
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import AnyDocument, declared_document
from weft.kernel.errors.error_tree import FieldError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.schemas.field_rules import check_message
from weft.kernel.values.names import CENTRAL_RUNNER, is_model_name, require_name_of_model

MAX_CLOCK_OFFSET_NANOSECONDS = 3_155_760_000 * 10**9
"""A hundred years; larger clock offsets are stored as this."""
DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000

_REASONS = frozenset(reason.value for reason in Reason)


def valid_opening(request: session_pb.OpenSessionRequest, config: RegistryConfig) -> list[LeftOut]:
    """Brings an OpenSession to its valid form, without the items that cannot be published; returns those.

    Raises INVALID_ARGUMENT naming the field if the runner itself is invalid, and the error of the first such item if
    the request requires all.
    """
    runner = request.runner
    # Checked first, even if it is not set, because clients derive ids from the name.
    removed = _valid_report(runner.capability, config)
    whole = request.requires_all
    if whole:
        check_message(runner, "runner")
    try:
        removed += clear_invalid(runner, runner.name)
    except FieldError:
        check_message(runner, "runner")
        raise
    if not runner.dial_out:
        runner.ClearField("joined_by")
    if runner.name == CENTRAL_RUNNER and runner.dial_out:
        raise invalid_field("runner.name", f"{CENTRAL_RUNNER} is the runner of the mesh itself; choose another name")

    def check_model(manifest: model_pb2.ModelManifest) -> None:
        if runner.dial_out:
            removed.extend(drop_recipe(manifest))
        check_manifest(manifest, "model", published=True)
        for field, name in (("model.name", manifest.name), ("model.pool_name", manifest.pool_name)):
            _require_other_name(field, name, {runner.name}, "must not be the name of the runner")

    removed += keep_valid(request.models, "model", config.max_models_per_session, check_model, requires_all=whole)
    own = {manifest.name for manifest in request.models if not manifest.pool_name}
    taken = {runner.name} | {name for manifest in request.models for name in (manifest.name, manifest.pool_name)}

    def check_own_agent(manifest: agent_pb2.AgentManifest) -> None:
        check_agent(manifest, "agent")
        if runner.dial_out and manifest.model not in own and any(needed_access(manifest)):
            raise invalid_field(
                "agent.tools", f"a joined machine may publish tools for its own models only; {DECLARE_OTHERS}"
            )
        _require_other_name(
            "agent.name", manifest.name, taken, "must not be the name of the runner, of a model or of a pool"
        )

    most = config.max_agents_per_session
    removed += keep_valid(request.agents, "agent", most, check_own_agent, requires_all=whole)
    check_message(request)
    return removed


def _require_other_name(field: str, name: str, taken: Container[str], problem: str) -> None:
    if name in taken:
        raise FieldError(field, problem, Reason.ALREADY_EXISTS)


def valid_heartbeat(request: session_pb.HeartbeatRequest, config: RegistryConfig) -> list[LeftOut]:
    """Brings a Heartbeat to its valid form, without the invalid parts of its report; returns those.

    Raises INVALID_ARGUMENT naming the field if it does not identify its session.
    """
    removed = _valid_report(request.capability, config) if request.HasField("capability") else []
    check_message(request)
    return removed


def _valid_report(report: runner_pb2.Capability, config: RegistryConfig) -> list[LeftOut]:
    """Brings a report to its canonical form, without its invalid parts; returns those."""
    removed: list[LeftOut] = []
    most = config.max_models_per_session

    def check_state(state: runner_pb2.InstanceState) -> None:
        removed.extend(clear_invalid(state, state.model))

    try:
        require_at_most(report.instances, "instances", most)
        check_message(report)
    except FieldError:
        removed += keep_valid(report.instances, "instance", most, check_state, name_field="model")
        removed += clear_invalid(report)
    to_canonical_report(report)
    return removed


def to_canonical_report(report: runner_pb2.Capability) -> None:
    """Brings a valid report to its canonical form."""
    report.DiscardUnknownFields()
    for state in report.instances:
        _to_canonical_instance(state)
    if report.HasField("clock_offset"):
        most, offset = MAX_CLOCK_OFFSET_NANOSECONDS, report.clock_offset.ToNanoseconds()
        report.clock_offset.FromNanoseconds(max(-most, min(most, offset)))
        if not offset:
            report.ClearField("clock_offset")


def _to_canonical_instance(state: runner_pb2.InstanceState) -> None:
    """Removes control characters from texts of programs, and normalizes timestamps and durations."""
    if state.detail:
        state.detail = without_control_characters(state.detail)
    if state.HasField("unload_time"):
        state.unload_time.FromDatetime(state.unload_time.ToDatetime(tzinfo=UTC))
    if state.HasField("load_eta"):
        state.load_eta.FromNanoseconds(state.load_eta.ToNanoseconds())
    if state.HasField("usual_load"):
        state.usual_load.FromNanoseconds(state.usual_load.ToNanoseconds())
    if state.HasField("last_fault"):
        state.last_fault.detail = without_control_characters(state.last_fault.detail)
        if state.last_fault.reason not in _REASONS:
            # The runner is newer than this registry.
            state.last_fault.ClearField("reason")


def page_of(request: pb.ListResourcesRequest) -> tuple[str, int]:
    """Returns the name after which a page begins, and its size. Raises INVALID_ARGUMENT naming the field."""
    if request.page_size < 0:
        raise invalid_field("page_size", "must not be negative")
    size = min(request.page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
    if not request.page_token:
        return "", size
    after = read_page_token(request.page_token)
    if not is_model_name(after):
        raise invalid_field("page_token", "must be one that an earlier page returned")
    return after, size


def events_of(
    request: pb.ListEventsRequest | pb.WatchEventsRequest,
) -> tuple[ResourceKind | None, str]:
    """Returns kind and name of the requested events, None and "" for all. Raises INVALID_ARGUMENT naming the field."""
    name = require_name_of_model(request.name, "name") if request.name else ""
    if not request.kind:
        if name:
            raise invalid_field("kind", "must be set where `name` is")
        return None, ""
    return to_kind(request.kind, "kind"), name


def event_limit(request: pb.ListEventsRequest) -> int:
    """Returns the maximum number of events. Raises INVALID_ARGUMENT naming the field."""
    return min(require_count(request.limit, "limit") or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A valid Apply."""

    documents: Sequence[AnyDocument]
    expected: Sequence[AnyDocument] = ()
    dry_run: bool = False
    adopt: bool = False


def valid_batch(request: declaration_service_pb2.ApplyRequest, config: RegistryConfig) -> Batch:
    """Returns a valid Apply, with unique names. Raises INVALID_ARGUMENT naming the field."""
    batch = Batch(
        documents=_valid_documents(request.declarations, "declarations", config),
        expected=_valid_documents(request.expected, "expected", config),
        dry_run=request.dry_run,
        adopt=request.adopt,
    )
    _require_unique_names(batch.documents)
    return batch


def _valid_documents(
    resources: Sequence[ResourceDocument], field: str, config: RegistryConfig
) -> Sequence[AnyDocument]:
    require_at_most(resources, field, config.max_declarations)
    return [_valid_document(resource, f"{field}[{index}]", config) for index, resource in enumerate(resources)]


def _valid_document(resource: ResourceDocument, field: str, config: RegistryConfig) -> AnyDocument:
    if resource.kind in config.kinds_off:
        raise invalid_field(field, config.kinds_off[resource.kind])
    document = declared_document(resource, field)
    kind, where = document.kind, f"{field}.{document.kind.value}"
    document.declared.DiscardUnknownFields()
    if kind in DECLARED_KINDS:
        DECLARED_KINDS[kind].check(document.declared, where)
    elif kind is ResourceKind.POOL:
        require_at_most(document.declared.members, f"{where}.members", config.max_models)
    check_message(document.declared, where)
    return document


def _declarations_field(index: int) -> str:
    return f"declarations[{index}]"


def _require_unique_names(documents: Sequence[AnyDocument], place: Callable[[int], str] = _declarations_field) -> None:
    """Raises INVALID_ARGUMENT for two documents with one name, except pool and model. `place` returns a field name."""
    owners: dict[tuple[ResourceKind | None, str], int] = {}
    pools = {each.name for each in documents if each.kind is ResourceKind.POOL}
    pools |= {each.manifest.pool_name for each in documents if each.kind is ResourceKind.MODEL}
    for index, document in enumerate(documents):
        name, kind = document.name, document.kind
        space = None if KINDS[kind].shares_namespace else kind
        earlier = owners.setdefault((space, name), index)
        if earlier != index:
            what = "also declared in this call" if kind is ResourceKind.POOL else f"also that of {place(earlier)}"
            raise invalid_field(place(index), f"its name is {what}")
        if not space and name in pools and kind is not ResourceKind.MODEL:
            raise invalid_field(place(index), "its name is also that of a pool in this call")
