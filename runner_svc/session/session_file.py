"""The file with a runner's session id, with which its next process takes over the registration.

A separate module, because the host of `weft up` reads the file and must not import a runner for it.
"""

import re
from contextlib import suppress
from pathlib import Path

from weft.kernel.machine.file_replacement import replace_file, set_aside
from weft.kernel.telemetry.log import get_logger

log = get_logger("weft.session")

MAX_SESSION_FILE_BYTES = 256
_SESSION_ID = re.compile(rb"[A-Za-z0-9_.:-]{1,128}")


class SessionFile:
    """Reads and writes the session id. If the file is damaged or inaccessible, the id is lost, but the runner works.

    A damaged file is renamed to `<name>.bad`, and a new session is opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._on_disk: str | None = None
        """The id that the file is known to contain; None: none."""

    def read(self) -> str:
        """Returns the id of the last session; empty: there is none, or the file is unusable."""
        try:
            with self._path.open("rb") as file:
                content = file.read(MAX_SESSION_FILE_BYTES + 1).strip()
        except FileNotFoundError:
            return ""
        except OSError as error:
            self._give_up(error.strerror or type(error).__name__)
            return ""
        if _SESSION_ID.fullmatch(content) is None:
            self._give_up("it is empty" if not content else "it holds no session id")
            return ""
        self._on_disk = content.decode("ascii")
        return self._on_disk

    def keep(self, session_id: str) -> None:
        """Writes the id unless the file already contains it. Only logs errors: this process does not need the file."""
        if session_id == self._on_disk:
            return
        try:
            replace_file(self._path, session_id.encode("ascii") + b"\n")
        except OSError as error:
            log.error(  # noqa: TRY400 - the system's message is enough
                "cannot write the session id; the runner continues without it. Free the disk or make the file writable",
                file=str(self._path),
                why=error.strerror,
            )
        else:
            self._on_disk = session_id

    def forget(self) -> None:
        """Removes the id after the session was closed for good. A remaining file is harmless: its id is unknown."""
        self._on_disk = None
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _give_up(self, why: str) -> None:
        self._on_disk = None
        aside = set_aside(self._path)
        log.warning(
            "the session file cannot be used, a new session is opened",
            file=str(self._path),
            why=why,
            set_aside_as=None if aside is None else str(aside),
        )
