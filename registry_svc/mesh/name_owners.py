"""Wanted names, with their current owners. `policy/namespace` decides on them."""

from collections.abc import Iterator
from dataclasses import replace

from registry_svc.mesh.mesh_state import ResourceIndex
from registry_svc.mesh.overlay import may_serve
from registry_svc.mesh.policy.joining import Joiner
from registry_svc.mesh.policy.namespace import NameOwners, Owner
from registry_svc.mesh.session_state import SessionState
from weft.documents.kinds import DECLARED_KINDS
from weft.documents.resource_kinds import ResourceKind


def owners_of_name(
    mesh: ResourceIndex,
    kind: ResourceKind,
    name: str,
    *,
    besides: frozenset[str] = frozenset(),
    joiner: Joiner | None = None,
) -> NameOwners:
    """Returns a wanted name with its current owners; models in `besides` do not own a pool's name.

    `joiner`: the claimant if it joined over a relay; for it, others keep their names while they are away.
    """
    owners: list[Owner] = []
    runner, agent = mesh.of_runner(name), mesh.published_agent(name)
    if runner is not None:
        owners.append(_owner(ResourceKind.RUNNER, name, runner))
    if kind is not ResourceKind.POOL:
        owners += _model_owners(mesh, name)
    for other, declared in DECLARED_KINDS.items():
        if declared.shares_namespace and other is not ResourceKind.MODEL and name in mesh.documents[other]:
            owners.append(Owner(kind=other, name=name))
    if agent is not None:
        owners.append(_owner(ResourceKind.AGENT, name, agent[1]))
    if kind not in {ResourceKind.MODEL, ResourceKind.POOL}:
        owners += _pool_owners(mesh, name, besides)
    if joiner is not None:
        sessions = {owner: mesh.of_session(owner.session_id) for owner in owners}
        others = (owner for owner, state in sessions.items() if state and state.profile.joined_by != joiner.id)
        owners += [replace(owner, live=True) for owner in others]
    return NameOwners(kind=kind, name=name, owners=tuple(owners))


def _model_owners(mesh: ResourceIndex, name: str) -> Iterator[Owner]:
    declared, state = mesh.declared_model(name), mesh.publisher_of(name)
    if declared is not None:
        yield Owner(kind=ResourceKind.MODEL, name=name, runner=declared.declared_runner)
    if state is not None:
        owner = _owner(ResourceKind.MODEL, name, state, live=may_serve(declared, state.profile.name))
        yield replace(owner, listed=name in state.listed)


def _pool_owners(mesh: ResourceIndex, name: str, besides: frozenset[str]) -> Iterator[Owner]:
    for model in mesh.pools.naming(name):
        if model in besides:
            continue
        state = mesh.publisher_of(model)
        if state is None or mesh.is_declared(ResourceKind.MODEL, model):
            yield Owner(kind=ResourceKind.POOL, name=name)
        else:
            yield _owner(ResourceKind.POOL, name, state)


def _owner(kind: ResourceKind, name: str, state: SessionState, *, live: bool = True) -> Owner:
    return Owner(
        kind=kind,
        name=name,
        session_id=state.session.id,
        runner=state.profile.name,
        live=live and state.pulse.active,
    )
