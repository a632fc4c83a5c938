"""What is known of the session that a dial-out runner opened over its link."""

import asyncio
from dataclasses import dataclass, field

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


@dataclass(eq=False, slots=True, kw_only=True)
class LinkSession:
    """The session that was opened over one link."""

    runner: str = ""
    """Whose link it is: the first name that a session was asked for, whether it was opened or not."""
    session_id: str = ""
    incarnation: str = ""
    host: str = ""
    """Where the runner said that it runs."""
    max_requests: int = 0
    """Requests the runner works on at once; 0: no limit of its own."""
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    is_opening: bool = False
    """Whether the registry is being asked to open it."""
    refusal: WeftError | None = None
    """Why the last attempt to open it failed."""


def require_own(session: LinkSession, session_id: str) -> None:
    """Raise PERMISSION_DENIED unless the session was opened over this very link."""
    if not session.session_id or session_id != session.session_id:
        raise WeftError(Reason.PERMISSION_DENIED, "this is not the session that was opened over this link")
