"""What proves who a runner is: the session that it opened; and whether it is a guest, who joined over a link."""

from collections.abc import Callable

from registry_svc.mesh.core import RegistryCore

SessionOf = Callable[[str], tuple[str, str] | None]
"""By a runner's name: its session id and its present incarnation; None: there is no such runner."""
IsGuest = Callable[[str], bool]
"""By a runner's name: whether it joined over a link, so that which host it is on is its own word."""


OwnsModel = Callable[[str, str], bool]
"""By a runner's name and a model's: whether the runner publishes the model, so that its memory has an owner."""


def owns_all(_runner: str, _model: str) -> bool:
    """See OwnsModel: every lease has an owner."""
    return True


def owners_of(core: RegistryCore) -> OwnsModel:
    """Looks up whether a runner, active or not, publishes a model."""

    def owns_model(runner: str, model: str) -> bool:
        member = core.mesh.of_runner(runner)
        return member is not None and (not model or model in member.publications)

    return owns_model


def nobody(_: str) -> bool:
    """See IsGuest: there are no guests."""
    return False


def sessions_of(core: RegistryCore) -> SessionOf:
    """Looks a runner's session id and present incarnation up, whether it is active or not."""

    def session_of(runner: str) -> tuple[str, str] | None:
        member = core.mesh.of_runner(runner)
        return None if member is None else (member.session.id, member.session.incarnation)

    return session_of


def guests_of(core: RegistryCore) -> IsGuest:
    """Whether a runner that is known, active or not, joined over a link."""

    def is_guest(runner: str) -> bool:
        member = core.mesh.of_runner(runner)
        return member is not None and member.profile.dial_out

    return is_guest
