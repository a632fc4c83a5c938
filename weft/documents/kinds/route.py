"""Routes: ordered lists of models for one kind of task."""

from weft.api.registry.v1.route_pb2 import Route, RouteManifest
from weft.documents.conditions import route_conditions
from weft.documents.kind import DeclaredKind, PointsTo, ReferenceField, check_named
from weft.documents.resource_kinds import ResourceKind
from weft.documents.selectors import to_canonical_tags
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.time.timestamps import duration_of
from weft.kernel.values.names import ROUTE_PREFIX
from weft.kernel.values.units import hours_of, keep_alive_seconds


def check_route(manifest: RouteManifest, field: str) -> None:
    """Checks a route; see `DeclaredKind.check`."""
    check_named(manifest, field)
    to_canonical_tags(manifest, field)
    if manifest.HasField("budget"):
        manifest.budget.FromNanoseconds(manifest.budget.ToNanoseconds())
    if manifest.HasField("keep_alive"):
        seconds = keep_alive_seconds(manifest.keep_alive.ToNanoseconds() / 1e9, f"{field}.keep_alive")
        manifest.keep_alive.CopyFrom(duration_of(seconds))
    for index, condition in enumerate(manifest.conditions):
        where = f"{field}.conditions[{index}]"
        if condition.candidate not in manifest.candidates:
            raise invalid_field(f"{where}.candidate", f"{condition.candidate} is not a candidate of the route")
        if any(condition.candidate == other.candidate for other in manifest.conditions[:index]):
            raise invalid_field(f"{where}.candidate", f"{condition.candidate} has conditions already")
        if 0 < condition.max_prompt_tokens < condition.min_prompt_tokens:
            raise invalid_field(f"{where}.max_prompt_tokens", "must be at least min_prompt_tokens")
        hours_of(condition.hours, f"{where}.hours")


KIND = DeclaredKind(
    kind=ResourceKind.ROUTE,
    declared=RouteManifest,
    record=Route,
    summary="An ordered list of models for one kind of task.",
    conditions=route_conditions,
    check=check_route,
    references=(ReferenceField(name="candidates", to=PointsTo.MODEL_OR_POOL, key="candidate", words="candidate"),),
    prefix=ROUTE_PREFIX,
)
