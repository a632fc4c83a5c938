"""What a profile declares, as declarations."""

from weft.api.registry.v1.declaration_service_pb2 import Declaration
from weft.api.registry.v1.profile_pb2 import ProfileLoadSettings, ProfileManifest
from weft.api.runner.v1.load_pb2 import LoadOptions


def declarations_of(manifest: ProfileManifest) -> list[Declaration]:
    """Returns what a switch to a profile declares: models, agents, routes and aliases, each kind in its order."""
    return [
        *(Declaration(model=each) for each in manifest.models),
        *(Declaration(agent=each) for each in manifest.agents),
        *(Declaration(route=each) for each in manifest.routes),
        *(Declaration(alias=each) for each in manifest.aliases),
    ]


def load_options_of(settings: ProfileLoadSettings) -> LoadOptions:
    """Returns the settings of a load as runners take them: the same fields, in a message of their package."""
    return LoadOptions.FromString(settings.SerializeToString())


def load_settings_of(options: LoadOptions) -> ProfileLoadSettings:
    """Returns how a model is loaded as profiles have it; see `load_options_of`."""
    return ProfileLoadSettings.FromString(options.SerializeToString())


def profile_field(manifest: ProfileManifest, index: int) -> str:
    """Returns the place of one of these declarations in its profile, such as "agents[0]"."""
    for field in ("models", "agents", "routes", "aliases"):
        count = len(getattr(manifest, field))
        if index < count:
            return f"{field}[{index}]"
        index -= count
    return field
