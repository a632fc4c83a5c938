"""The sandbox for chat templates, and the templates of model files.

A chat template is an untrusted program in a model file. It is rendered in a process of its own with bounds on memory,
time and output, which is killed when it exceeds them. Jinja's own sandbox limits what a template can access; it does
not prevent `'a' * 2000000000`.
"""

import asyncio
import json
import os
import signal
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from runner_svc.model_files.gguf import MAX_TEXT_BYTES, GgufHeader, is_gguf, read_gguf_header
from runner_svc.model_files.tokenizer_folder import TokenizerFolder, read_tokenizer_folder
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason

MAX_REQUEST_BYTES = 32 * 1024 * 1024
"""Maximum size of template and conversation together."""
START_SECONDS = 15.0
"""Timeout of starting a process and loading its library: 0.1 s on an idle machine."""
MAX_MESSAGE_BYTES = 4096
"""Maximum overhead of an answer over the text in it."""
READY = bytes(4)
"""Bytes that the worker writes once it can render."""
_LIMITS = "limits"
_CONVERSATION = "conversation"
_TRIES = 2
"""Number of attempts at a rendering whose process is killed from outside."""
_WORKER = str(Path(__file__).with_name("render_worker.py"))
_ESCAPES = 6
"""Maximum bytes per character of output in the worker's answer."""
_KEPT_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "TZ", "SYSTEMROOT")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits of one rendering."""

    wall_seconds: float = 5.0
    cpu_seconds: int = 2
    memory_bytes: int = 512 * 1024 * 1024
    """Address space of the process, its interpreter included. Linux enforces it; macOS does not."""
    output_bytes: int = 4 * 1024 * 1024
    processes: int = 2
    """Number of concurrent renderings; others wait, for at most the wall time of each."""


class _Answer(msgspec.Struct):
    text: str | None = None
    cause: str = ""
    message: str = ""


class TemplateSandbox:
    """A pool of rendering processes, started on demand and kept for the next rendering."""

    def __init__(self, limits: SandboxLimits | None = None) -> None:
        self._limits = limits or SandboxLimits()
        self._processes: set[asyncio.subprocess.Process] = set()
        self._free: list[asyncio.subprocess.Process] = []
        self._places = asyncio.Semaphore(self._limits.processes)
        self._decoder = msgspec.json.Decoder(_Answer)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """End every process; running renderings fail. Idempotent; the next rendering starts a new process."""
        for process in tuple(self._processes):
            await self._end(process)

    async def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """Returns the prompt. Raises TEMPLATE_FAILED with the cause, without text of the template.

        Raises INVALID_ARGUMENT with the template's own message where it refuses the conversation: roles that do not
        alternate, a system message, images.
        """
        answer = await self._request(template, variables)
        if answer.cause == _CONVERSATION:
            raise invalid_field("messages", f"the model's chat template refuses them: {answer.message}")
        if answer.text is None:
            raise _failed(answer.message)
        return answer.text

    async def check(self, template: str, variables: Mapping[str, Any]) -> None:
        """Raise TEMPLATE_FAILED if the template exceeds the limits.

        A template that only refuses these variables passes: some require an order of roles.
        """
        answer = await self._request(template, variables)
        if answer.cause == _LIMITS:
            raise _failed(answer.message)

    async def _request(self, template: str, variables: Mapping[str, Any]) -> _Answer:
        try:
            body = json.dumps({"template": template, "variables": dict(variables)}).encode()
        except RecursionError:
            raise _failed("the conversation is nested too deeply") from None
        if len(body) > MAX_REQUEST_BYTES:
            raise _failed(f"it and the conversation are over {MAX_REQUEST_BYTES} bytes")
        async with self._places:
            for _ in range(_TRIES):
                answer = await self._once(body)
                if answer is not None:
                    return answer
        raise WeftError(
            Reason.INTERNAL, "the process that renders chat templates was killed, perhaps for want of memory"
        )

    async def _once(self, body: bytes) -> _Answer | None:
        """Returns the answer of one process; None: it was killed from outside, which is no fault of the template."""
        process = await self._free_process()
        answer = None
        try:
            answer = await self._exchange(process, body)
            if answer is None and process not in self._processes:
                raise WeftError(Reason.WORKER_RESTARTED, "the engine was stopped while it worked on the request")
        finally:
            # A process that reached its limits may be in any state.
            if answer is not None and answer.cause != _LIMITS and process in self._processes:
                self._free.append(process)
            else:
                await self._end(process)
        return answer

    async def _exchange(self, process: asyncio.subprocess.Process, body: bytes) -> _Answer | None:
        limits, (requests, answers) = self._limits, _pipes(process)
        try:
            async with asyncio.timeout(limits.wall_seconds):
                requests.write(struct.pack(">I", len(body)) + body)
                try:
                    await requests.drain()
                    length = struct.unpack(">I", await answers.readexactly(4))[0]
                    if length > _ESCAPES * limits.output_bytes + MAX_MESSAGE_BYTES:
                        return _Answer(cause=_LIMITS, message="it writes too much")
                    return self._decoder.decode(await answers.readexactly(length))
                except (asyncio.IncompleteReadError, OSError):
                    # A template can end its process in many ways, but SIGKILL comes from the kernel or a person.
                    if await process.wait() == -signal.SIGKILL:
                        return None
                    return _Answer(cause=_LIMITS, message="it ended the process that renders it")
        except TimeoutError:
            return _Answer(cause=_LIMITS, message=f"it takes longer than {limits.wall_seconds:g} s")
        except msgspec.DecodeError:
            return _Answer(cause=_LIMITS, message="it ended the process that renders it")

    async def _free_process(self) -> asyncio.subprocess.Process:
        while self._free:
            process = self._free.pop()
            if process.returncode is None:
                return process
            await self._end(process)
        process = await self._start()
        self._processes.add(process)
        try:
            async with asyncio.timeout(START_SECONDS):
                await _pipes(process)[1].readexactly(len(READY))
        except BaseException as error:
            await self._end(process)
            if isinstance(error, (TimeoutError, asyncio.IncompleteReadError)):
                raise WeftError(Reason.INTERNAL, "the process that renders chat templates did not start") from error
            raise
        return process

    async def _start(self) -> asyncio.subprocess.Process:
        limits = self._limits
        worker_limits = {
            "memory_bytes": limits.memory_bytes,
            "cpu_seconds": limits.cpu_seconds,
            "output_bytes": limits.output_bytes,
        }
        try:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", _WORKER, str(os.getpid()), json.dumps(worker_limits)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env={name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ},
                start_new_session=True,
            )
        except OSError as error:
            raise WeftError(
                Reason.INTERNAL, f"the process that renders chat templates cannot be started: {error.strerror}"
            ) from error

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        self._processes.discard(process)
        if process in self._free:
            self._free.remove(process)
        with suppress(ProcessLookupError):
            process.kill()
        requests, _ = _pipes(process)
        requests.close()
        await process.wait()


def _pipes(process: asyncio.subprocess.Process) -> tuple[asyncio.StreamWriter, asyncio.StreamReader]:
    assert process.stdin is not None, "it is a pipe"
    assert process.stdout is not None, "it is a pipe"
    return process.stdin, process.stdout


def _failed(why: str) -> WeftError:
    return WeftError(Reason.TEMPLATE_FAILED, f"the chat template cannot be used: {why}")


TOOL_USE = "tool_use"
"""Name of the template that model files may have beside the usual one, for requests with tools."""
_SAMPLE = {
    "messages": [
        {"role": "system", "content": "You are helpful."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hello, how can I help?"},
        {"role": "user", "content": "Count to three."},
    ],
    "add_generation_prompt": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTemplates:
    """The chat templates of one model."""

    usual: str | None = None
    """The template of most requests; None: there is none, so the model cannot chat."""
    tool_use: str | None = None
    """Template of requests with tools; None: the usual one."""
    bos_token: str = ""
    eos_token: str = ""
    others: tuple[str, ...] = ()
    """Further templates of the file, which an engine may use."""

    @property
    def all(self) -> tuple[str, ...]:
        """All templates that an engine may choose."""
        found = (self.usual, self.tool_use, *self.others)
        return tuple(template for template in found if template is not None)

    def pick(self, has_tools: bool) -> str | None:
        """Returns the template for a request."""
        return self.tool_use if has_tools and self.tool_use is not None else self.usual


async def read_templates(model_path: Path, override: Path | None) -> ModelTemplates:
    """Reads the templates of a model file, or the one in `override` instead.

    Raises INVALID_ARGUMENT for a malformed GGUF file, or for an override that is no text or over MAX_TEXT_BYTES;
    CONNECT_FAILED for a file that cannot be read. A file of another format has no templates: the engine decides whether
    it is usable.
    """
    try:
        return await asyncio.to_thread(_read, model_path, override)
    except OSError as error:
        raise WeftError(Reason.CONNECT_FAILED, f"the model's files cannot be read: {error.strerror}") from error


def _read(model_path: Path, override: Path | None) -> ModelTemplates:
    header: TokenizerFolder | GgufHeader = TokenizerFolder()
    if model_path.is_dir():
        header = read_tokenizer_folder(model_path)
    elif is_gguf(model_path):
        header = read_gguf_header(model_path)
    if override is not None:
        return ModelTemplates(usual=_text(override), bos_token=header.bos_token, eos_token=header.eos_token)
    named = dict(header.named_templates)
    return ModelTemplates(
        usual=header.chat_template,
        tool_use=named.pop(TOOL_USE, None),
        bos_token=header.bos_token,
        eos_token=header.eos_token,
        others=tuple(named.values()),
    )


def _text(path: Path) -> str:
    with path.open("rb") as file:
        raw = file.read(MAX_TEXT_BYTES + 1)
    if len(raw) > MAX_TEXT_BYTES:
        raise WeftError(Reason.INVALID_ARGUMENT, f"the file in chat_template_path is over {MAX_TEXT_BYTES} bytes")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise WeftError(Reason.INVALID_ARGUMENT, "the file in chat_template_path is not UTF-8 text") from None


async def check_templates(templates: ModelTemplates, sandbox: TemplateSandbox) -> None:
    """Render each template once with a sample conversation, before an engine without a sandbox uses it.

    Raises TEMPLATE_FAILED for one that exceeds the sandbox's limits. One that only refuses the sample passes.
    """
    tokens = {"bos_token": templates.bos_token, "eos_token": templates.eos_token}
    for template in templates.all:
        await sandbox.check(template, {**_SAMPLE, **tokens})


async def check_before_load(model_path: Path, override: Path | None) -> ModelTemplates:
    """Check the templates of a model whose engine renders them itself, and return them; takes 0.15 s.

    Raises as `read_templates` and `check_templates`, except for a model file that cannot be read: the engine's error is
    better.
    """
    try:
        templates = await read_templates(model_path, override)
    except WeftError as error:
        if error.reason is Reason.CONNECT_FAILED and override is None:
            return ModelTemplates()
        raise
    if templates.all:
        async with TemplateSandbox() as sandbox:
            await check_templates(templates, sandbox)
    return templates
