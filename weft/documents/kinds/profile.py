"""Profiles: mesh configurations that operators activate as a whole."""

from weft.api.registry.v1.profile_pb2 import Profile, ProfileManifest
from weft.documents.kind import DeclaredKind, check_named
from weft.documents.kinds.agent import check_agent
from weft.documents.kinds.alias import check_alias
from weft.documents.kinds.model import check_model
from weft.documents.kinds.route import check_route
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors import invalid_field


def check_profile(manifest: ProfileManifest, field: str) -> None:
    """Checks a profile; see `DeclaredKind.check`. The error's field may be nested, such as "agents[0].name"."""
    check_named(manifest, field)
    for index, model in enumerate(manifest.models):
        check_model(model, f"{field}.models[{index}]")
    for index, agent in enumerate(manifest.agents):
        check_agent(agent, f"{field}.agents[{index}]")
    for index, route in enumerate(manifest.routes):
        check_route(route, f"{field}.routes[{index}]")
    for index, alias in enumerate(manifest.aliases):
        check_alias(alias, f"{field}.aliases[{index}]")
    loads = [each.model for each in manifest.load]
    for index, load in enumerate(manifest.load):
        if load.model in loads[:index]:
            raise invalid_field(f"{field}.load[{index}].model", f"must be named once; {load.model} is twice")
        if load.model in manifest.unload:
            raise invalid_field(f"{field}.unload", f"must not name {load.model}, which is to be loaded")
        if not load.settings.ByteSize():
            load.ClearField("settings")


KIND = DeclaredKind(
    kind=ResourceKind.PROFILE,
    declared=ProfileManifest,
    record=Profile,
    summary="A named configuration of the mesh, switched to as a whole.",
    check=check_profile,
    # Activation may affect resources that the profile does not name.
    by_name=False,
    shares_namespace=False,
)
