"""Envoy's administration over its Unix socket: readiness, addresses, draining."""

from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft_app.edge.edge_document import LISTENER
from weft_app.edge.plan import Endpoint

MAX_ANSWER_BYTES = 1_048_576
_ACTIVE = f"http.{LISTENER}.downstream_rq_active"


class EnvoyAdmin:
    """Calls to the administration of one Envoy; every failure is a WeftError."""

    def __init__(self, socket: Path, timeout_seconds: float) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path=str(socket)),
            timeout=aiohttp.ClientTimeout(total=timeout_seconds),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def is_ready(self) -> bool:
        """Whether it serves."""
        try:
            return (await self._call("GET", "/ready"))[0] == 200
        except WeftError:
            return False

    async def listener(self) -> Endpoint | None:
        """Returns the address that its listener has got; None: it has none yet."""
        status, text = await self._call("GET", "/listeners")
        for line in text.splitlines() if status == 200 else ():
            name, _, address = line.partition("::")
            host, separator, port = address.rpartition(":")
            if name == LISTENER and separator and port.isdecimal():
                return Endpoint(host=host.removeprefix("[").removesuffix("]"), port=int(port))
        return None

    async def drain(self) -> None:
        """Has it ask callers to connect elsewhere, and close its port after the time of notice."""
        await self._call("POST", "/drain_listeners?graceful&skip_exit")

    async def active_requests(self) -> int:
        """Returns how many requests it carries."""
        _, text = await self._call("GET", f"/stats?filter=^{_ACTIVE}$")
        _, _, count = text.strip().rpartition(" ")
        return int(count) if count.isdecimal() else 0

    async def _call(self, method: str, path: str) -> tuple[int, str]:
        try:
            async with self._session.request(method, f"http://envoy{path}") as answer:
                return answer.status, (await answer.content.read(MAX_ANSWER_BYTES)).decode("utf-8", "replace")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, f"Envoy's administration does not answer: {error}") from error
