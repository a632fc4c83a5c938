"""Holders of leases, checked against the sessions of the mesh: who a runner is, and which models it publishes."""

from collections.abc import Callable

from registry_svc.ledger.lease_table import IsDialOut
from registry_svc.ledger.policy.leases import Holder, HolderKind
from registry_svc.mesh.core import RegistryCore
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

SessionOf = Callable[[str], tuple[str, str] | None]
"""By a runner's name: its session id and its present incarnation; None: there is no such runner."""
OwnsModel = Callable[[str, str], bool]
"""By a runner's name and a model's: whether the runner publishes the model, so that its memory has an owner."""


def owns_all(_runner: str, _model: str) -> bool:
    """See OwnsModel: every lease has an owner."""
    return True


def owner_lookup(core: RegistryCore) -> OwnsModel:
    """Looks up whether a runner, active or not, publishes a model."""

    def owns_model(runner: str, model: str) -> bool:
        state = core.mesh.of_runner(runner)
        return state is not None and (not model or model in state.publications)

    return owns_model


def session_lookup(core: RegistryCore) -> SessionOf:
    """Looks a runner's session id and present incarnation up, whether it is active or not."""

    def session_of(runner: str) -> tuple[str, str] | None:
        state = core.mesh.of_runner(runner)
        return None if state is None else (state.session.id, state.session.incarnation)

    return session_of


def dial_out_lookup(core: RegistryCore) -> IsDialOut:
    """Whether a runner that is known, active or not, joined over a link."""

    def is_dial_out(runner: str) -> bool:
        state = core.mesh.of_runner(runner)
        return state is not None and state.profile.dial_out

    return is_dial_out


class HolderSessions:
    """Checks that a lease holder names the session of its runner and is its present incarnation."""

    def __init__(self, session_of: SessionOf) -> None:
        self._session_of = session_of

    def is_present(self, holder: Holder, session_id: str) -> bool:
        """Return whether a holder is in its present incarnation. Raises PERMISSION_DENIED for another session."""
        if holder.kind is HolderKind.PROGRAM:
            return True
        session = self._session_of(holder.name)
        if session is None or session[0] != session_id:
            raise WeftError(
                Reason.PERMISSION_DENIED,
                f"this is not the session of the runner {holder.name!r}; open one first",
                metadata={"runner": holder.name},
            )
        return session[1] == holder.incarnation

    def require_present(self, holder: Holder, session_id: str) -> None:
        """Raise PERMISSION_DENIED unless the holder is the runner of the session, in its present incarnation."""
        if not self.is_present(holder, session_id):
            raise WeftError(
                Reason.PERMISSION_DENIED,
                f"the runner {holder.name!r} has another incarnation since; open its session again",
                metadata={"runner": holder.name},
            )
