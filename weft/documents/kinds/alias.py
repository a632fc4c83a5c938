"""Aliases: other names of models, pools, agents, routes and workflows."""

import re

from weft.api.registry.v1.alias_pb2 import Alias, AliasManifest
from weft.dispatch.declared_presets import check_preset
from weft.documents.kind import DeclaredKind, PointsTo, ReferenceField
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.schemas.field_rules import check_message
from weft.kernel.values.names import ascii_name
from weft.kernel.values.names import check_alias as check_pattern

_OWN_HEADERS = re.compile(
    "(accept|content-|proxy-).*|anthropic-version|(x-)?api-key|authorization|connection|expect|host|keep-alive|te|"
    "trailer|transfer-encoding|upgrade|user-agent"
)
"""Headers that decide what is sent, to whom, and who pays."""


def check_alias(manifest: AliasManifest, field: str) -> None:
    """Checks an alias and sets its pattern; see `DeclaredKind.check`."""
    check_message(manifest, field)
    manifest.DiscardUnknownFields()
    manifest.target = ascii_name(manifest.target)
    check_pattern(manifest.name, manifest.pattern, manifest.target, manifest.tenant, field)
    manifest.pattern = manifest.pattern or manifest.name
    check_preset(manifest, f"{field}.")
    for name, value in manifest.provider_headers.items():
        if _OWN_HEADERS.fullmatch(name.lower()):
            raise invalid_field(f"{field}.provider_headers[{name}]", "is set by weft; leave it out")
        if not value.isascii():
            raise invalid_field(f"{field}.provider_headers[{name}]", "must be ASCII text")


def _names(manifest: AliasManifest) -> tuple[str, str]:
    """Returns the alias's name and pattern: its author must be allowed to edit the names that it redirects."""
    return manifest.name, manifest.pattern or manifest.name


def _scope(manifest: AliasManifest) -> tuple[str, str]:
    return manifest.tenant, manifest.pattern


KIND = DeclaredKind(
    kind=ResourceKind.ALIAS,
    declared=AliasManifest,
    record=Alias,
    summary="Another name of a model, a pool, an agent or a route.",
    check=check_alias,
    references=(
        ReferenceField(name="target", to=PointsTo.REQUESTABLE, key="target", words="target (never another alias)"),
    ),
    names=_names,
    scope=_scope,
    scope_field="pattern",
    shares_namespace=False,
    configured="registry.aliases",
    initial={"source": Alias.SOURCE_DECLARED},
)
