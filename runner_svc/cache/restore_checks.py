"""Tests of engines, once per build, files and settings: whether they continue prompts that they restore."""

import asyncio
from contextlib import aclosing
from pathlib import Path

import msgspec

from runner_svc.backend.port import Backend, CacheUse, CallInfo
from weft.api.common.v1 import completion_pb2, sampling_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.machine.file_replacement import replace_file
from weft.kernel.telemetry.log import get_logger
from weft.kernel.text.decoding import DECODE_FAULTS
from weft.kernel.values.names import new_id

CHECK_SECONDS = 3.0
"""Timeout of a test, which delays the first start of an engine."""
MAX_CHECKS = 256
"""Maximum number of stored results; the oldest is dropped first."""
_SLOT, _NAME = 0, "restore-check"
_PROMPT = completion_pb2.CompletionPayload(
    prompts=[completion_pb2.PromptInput(text="one two three four five six seven eight nine ten eleven twelve")],
    sampling=sampling_pb2.SamplingParams(max_tokens=1),
)

log = get_logger("weft.runner")


class RestoreCheck(msgspec.Struct, frozen=True):
    """Whether an engine continues restored prompts."""

    resumes: bool | None
    """None: unknown, until the next start of the runner."""
    reason: str = ""
    """Why it does not, or why it is unknown; empty: it does."""


class RestoreChecks:
    """The results by `Backend.state_identity`, in a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._found: dict[str, RestoreCheck] = {}

    def read(self) -> None:
        """Reads the results of earlier processes; a damaged or unreadable file has none."""
        try:
            self._found = msgspec.json.decode(self._file.read_bytes(), type=dict[str, RestoreCheck])
        except (OSError, *DECODE_FAULTS):
            self._found = {}

    def of(self, backend: Backend) -> RestoreCheck | None:
        """Returns the result of an engine; None: it was not tested."""
        return self._found.get(backend.state_identity)

    async def examine(self, backend: Backend) -> None:
        """Tests a started engine without requests that can save prompts, unless there is a result."""
        identity = backend.state_identity
        if not identity or identity in self._found:
            return
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                check = await _checked(backend)
        except TimeoutError:
            check = RestoreCheck(None, f"the test took longer than {CHECK_SECONDS:g} s")
        except WeftError as error:
            check = RestoreCheck(None, error.log_message)
        self._found[identity] = check
        while len(self._found) > MAX_CHECKS:
            del self._found[next(iter(self._found))]
        log.info("restore of prompts tested", resumes=check.resumes, reason=check.reason)
        known = {name: each for name, each in self._found.items() if each.resumes is not None}
        try:
            await asyncio.to_thread(replace_file, self._file, msgspec.json.encode(known))
        except OSError as error:
            log.warning("the result of a restore is not stored", file=str(self._file), error=error.strerror)


async def _checked(backend: Backend) -> RestoreCheck:
    await _cached_tokens(backend)
    try:
        await backend.save_slot(_SLOT, _NAME)
        await backend.erase_cache([_SLOT])
        await backend.restore_slot(_SLOT, _NAME)
    except WeftError as error:
        if error.reason not in (Reason.BACKEND_ERROR, Reason.UNSUPPORTED_OPERATION):
            raise
        return RestoreCheck(resumes=False, reason=error.log_message)
    finally:
        backend.delete_saved([_NAME])
    # llama.cpp#26676: the number of restored tokens that a server reports says nothing.
    resumes = await _cached_tokens(backend) > 0
    await backend.erase_cache([_SLOT])
    return RestoreCheck(resumes=resumes, reason="" if resumes else "the engine processes restored prompts again")


async def _cached_tokens(backend: Backend) -> int:
    cached = 0
    call = CallInfo(request_id=new_id("check"), traceparent="", cache=CacheUse(slot=_SLOT))
    async with aclosing(backend.generate(_PROMPT, call)) as frames:
        async for frame in frames:
            cached = frame[-1].finished.receipt.usage.cached_prompt_tokens
    return cached
