"""What proves who a runner is: the session that it opened."""

from registry_svc.core import RegistryCore
from registry_svc.ledger.ledger import SessionOf


def sessions_of(core: RegistryCore) -> SessionOf:
    """Looks a runner's session id and present incarnation up, whether it is active or not."""

    def session_of(runner: str) -> tuple[str, str] | None:
        member = core.mesh.of_runner(runner)
        return None if member is None else (member.session.id, member.session.incarnation)

    return session_of
