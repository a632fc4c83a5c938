"""The slots of a running llama.cpp server: what they do, and how what they have cached is erased.

Three facts of the server decide this file (all measured, with 0.5.0 of November 2026). It moves prompts between slots
through a cache in the host's memory, 8 GiB of it unless a flag says otherwise, so a tenant finds there what another one
left: it is switched off. It answers POST /slots/ID only when it was started with --slot-save-path. It works on a task
for a busy slot when that comes free, and on a task for a slot that it does not have in any other.
"""

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec

from runner_svc.backend.port import ErasedCache, SlotSnapshot
from runner_svc.openai_upstream.client import OpenAiHttp
from runner_svc.openai_upstream.errors import JSON_FAULTS
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

SLOTS = "/slots"
LOOK_SECONDS = 1.0
"""The server answers in milliseconds, also while it works on a prompt."""
ERASE_SECONDS = 30.0
"""How long a slot that is to be erased may still be at work; the server waits for it."""
NO_HOST_CACHE: Mapping[str, str] = MappingProxyType({"LLAMA_ARG_CACHE_RAM": "0", "LLAMA_ARG_CACHE_IDLE_SLOTS": "0"})
"""In the environment: servers that are older than that cache refuse its flag, and know no other way to share."""
NO_TASK = -1
"""What servers say of a slot that has never worked, or say nothing at all."""
_HOST_CACHE_FLAGS = ("--cache-ram", "-cram")


def slot_arguments() -> tuple[str, ...]:
    """What lets slots be erased. Nothing is ever saved in the folder; it only has to be there."""
    return ("--slot-save-path", tempfile.gettempdir())


def shares_between_slots(extra_arguments: Sequence[str]) -> bool:
    """Whether an operator has switched the host's memory cache on again."""
    return any(argument.split("=", 1)[0] in _HOST_CACHE_FLAGS for argument in extra_arguments)


class _Slot(msgspec.Struct):
    id: int
    is_processing: bool = False
    id_task: int = NO_TASK
    n_prompt_tokens: int | None = None
    """What it holds; older servers do not say."""

    @property
    def sight(self) -> SlotSnapshot:
        is_unused = self.id_task == NO_TASK and self.n_prompt_tokens is None
        return SlotSnapshot(
            number=self.id,
            is_busy=self.is_processing,
            is_empty=not self.is_processing and (is_unused or self.n_prompt_tokens == 0),
            task=None if self.id_task == NO_TASK else self.id_task,
        )


class _Erased(msgspec.Struct):
    n_erased: int = 0


class LlamaSlots:
    """The slots of one life of a server."""

    def __init__(self, http: OpenAiHttp, count: int) -> None:
        """`count`: how many it has by its own word; 0: unknown."""
        self._http = http
        self.count = count

    async def look(self) -> tuple[SlotSnapshot, ...]:
        """See SlottedEngine.slot_snapshots."""
        try:
            status, body = await self._http.ask("GET", SLOTS, LOOK_SECONDS)
            slots = msgspec.json.decode(body, type=list[_Slot]) if status == 200 else []
        except (WeftError, *JSON_FAULTS):
            return ()
        return tuple(slot.sight for slot in slots)

    async def erase(self, numbers: Sequence[int] | None) -> ErasedCache:
        """See Backend.erase_cache; busy slots are waited for, ERASE_SECONDS at most."""
        chosen = range(self.count) if numbers is None else numbers
        counts = await asyncio.gather(*(self._erase(number) for number in chosen))
        return ErasedCache(entry_count=sum(count > 0 for count in counts), token_count=sum(counts))

    async def _erase(self, number: int) -> int:
        status, body = await self._http.ask("POST", f"{SLOTS}/{number}?action=erase", ERASE_SECONDS)
        if status in (404, 501):
            raise WeftError(Reason.UNSUPPORTED_OPERATION, "this server cannot erase what its slots have cached")
        try:
            if status == 200:
                return max(0, msgspec.json.decode(body, type=_Erased).n_erased)
        except JSON_FAULTS:
            pass
        raise WeftError(Reason.BACKEND_ERROR, f"the server did not erase slot {number} (status {status})")
