"""Trials: a share of a tenant's requests, answered again by a candidate."""

from weft.api.registry.v1.trial_pb2 import Trial, TrialManifest
from weft.documents.kind import DeclaredKind, PointsTo, ReferenceField, check_named
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.access.principal import Resource
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.schemas.field_rules import rules_of
from weft.kernel.values.names import ascii_name

DEFAULT_MAX_PAIRS = 100
MAX_PAIRS = int(rules_of(TrialManifest.DESCRIPTOR.fields_by_name["max_pairs"]).maximum)


def check_trial(manifest: TrialManifest, field: str) -> None:
    """Checks a trial; see `DeclaredKind.check`."""
    check_named(manifest, field)
    manifest.candidate, manifest.against = ascii_name(manifest.candidate), ascii_name(manifest.against)
    if manifest.candidate == manifest.against:
        raise invalid_field(f"{field}.candidate", "must differ from against; name another model to compare it with")
    manifest.max_pairs = manifest.max_pairs or DEFAULT_MAX_PAIRS


KIND = DeclaredKind(
    kind=ResourceKind.TRIAL,
    declared=TrialManifest,
    record=Trial,
    summary="A comparison of two models by the requests of one tenant.",
    check=check_trial,
    by_name=False,
    resource=Resource.SETTINGS,
    references=tuple(
        ReferenceField(name=name, to=PointsTo.REQUESTABLE, key=name, words=name) for name in ("candidate", "against")
    ),
    shares_namespace=False,
)
