"""Converts between a profile's declarations and documents."""

from weft.api.registry.v1.profile_pb2 import ProfileLoadSettings, ProfileManifest
from weft.api.runner.v1.load_pb2 import LoadOptions
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import AnyDocument, new_document

PROFILED_KINDS = (ResourceKind.MODEL, ResourceKind.AGENT, ResourceKind.ROUTE, ResourceKind.ALIAS)
"""Kinds that a profile can declare; each is in the field named after its plural."""


def documents_of(manifest: ProfileManifest) -> list[AnyDocument]:
    """Returns the documents that a profile declares, in the order of `PROFILED_KINDS`."""
    own = type(manifest)()
    own.CopyFrom(manifest)
    return [new_document(kind, each) for kind in PROFILED_KINDS for each in getattr(own, kind.plural)]


def load_options_of(settings: ProfileLoadSettings) -> LoadOptions:
    """Converts a profile's load settings to load options: the same fields in another package's message."""
    return LoadOptions.FromString(settings.SerializeToString())


def load_settings_of(options: LoadOptions) -> ProfileLoadSettings:
    """Converts load options to a profile's load settings."""
    return ProfileLoadSettings.FromString(options.SerializeToString())


def profile_field(manifest: ProfileManifest, index: int) -> str:
    """Returns the field of one of these declarations in its profile, such as "agents[0]"."""
    for kind in PROFILED_KINDS:
        count = len(getattr(manifest, kind.plural))
        if index < count:
            return f"{kind.plural}[{index}]"
        index -= count
    return kind.plural
