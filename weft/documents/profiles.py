"""What a profile declares, as documents."""

from weft.api.registry.v1.profile_pb2 import ProfileLoadSettings, ProfileManifest
from weft.api.runner.v1.load_pb2 import LoadOptions
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import AnyDocument, new_document

PROFILED_KINDS = (ResourceKind.MODEL, ResourceKind.AGENT, ResourceKind.ROUTE, ResourceKind.ALIAS)
"""Kinds that a profile declares, each in the field of its plural."""


def documents_of(manifest: ProfileManifest) -> list[AnyDocument]:
    """Returns what a switch to a profile declares, each kind in its order."""
    own = type(manifest)()
    own.CopyFrom(manifest)
    return [new_document(kind, each) for kind in PROFILED_KINDS for each in getattr(own, kind.plural)]


def load_options_of(settings: ProfileLoadSettings) -> LoadOptions:
    """Returns the settings of a load as runners take them: the same fields, in a message of their package."""
    return LoadOptions.FromString(settings.SerializeToString())


def load_settings_of(options: LoadOptions) -> ProfileLoadSettings:
    """Returns how a model is loaded as profiles have it; see `load_options_of`."""
    return ProfileLoadSettings.FromString(options.SerializeToString())


def profile_field(manifest: ProfileManifest, index: int) -> str:
    """Returns the place of one of these declarations in its profile, such as "agents[0]"."""
    for kind in PROFILED_KINDS:
        count = len(getattr(manifest, kind.plural))
        if index < count:
            return f"{kind.plural}[{index}]"
        index -= count
    return kind.plural
