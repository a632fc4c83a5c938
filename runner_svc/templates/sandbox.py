"""The sandbox for chat templates, and the templates of model files.

A chat template is an untrusted program in a model file. It is rendered in a separate process with limits on memory,
time and output, which is killed when it exceeds them. Neither Jinja's sandbox nor an engine that counts instructions
has these limits: docs/decisions/0104-templates-in-a-process.md.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from runner_svc.model_files.gguf import MAX_TEXT_BYTES, GgufHeader, is_gguf, read_gguf_header
from runner_svc.model_files.tokenizer_folder import TokenizerFolder, read_tokenizer_folder
from weft.kernel.errors.error_tree import WeftError, invalid_field, quoting_engine
from weft.kernel.errors.reasons import Reason

MAX_REQUEST_BYTES = 32 * 1024 * 1024
"""Maximum total size of template and conversation."""
MAX_ANSWER_BYTES = 25 * 1024 * 1024
"""Maximum answer of the worker: six bytes for each of its 4 MiB of output, plus a message."""
START_SECONDS = 15.0
"""Timeout for starting a process and importing its library: 0.1 s on an idle machine."""
WALL_SECONDS = 5.0
"""Timeout of a rendering. The worker itself limits memory, processor time and output."""
_LIMITS = "limits"
_CONVERSATION = "conversation"
_TRIES = 2
"""Number of attempts if the process is killed from outside."""
_WORKER = str(Path(__file__).with_name("render_worker.py"))
_KEPT_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "TZ", "SYSTEMROOT")


class _Answer(msgspec.Struct):
    text: str | None = None
    cause: str = ""
    message: str = ""


class TemplateSandbox:
    """A rendering process, started on demand and reused."""

    def __init__(self, wall_seconds: float = WALL_SECONDS) -> None:
        self._wall_seconds = wall_seconds
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._decoder = msgspec.json.Decoder(_Answer)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Ends the process; a running rendering fails. Idempotent; the next rendering starts a new process."""
        if self._process is not None:
            await self._end(self._process)

    async def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """Returns the prompt. Raises TEMPLATE_FAILED with the cause, without text of the template.

        Raises INVALID_ARGUMENT with the template's own message if it rejects the conversation, for example because
        roles do not alternate, or for a system message or images.
        """
        answer = await self._request(template, variables)
        if answer.cause == _CONVERSATION:
            words = "the model's chat template rejects them"
            raise quoting_engine(invalid_field("messages", f"{words}: {answer.message}"), f"messages: {words}")
        if answer.text is None:
            raise _failed(answer.message)
        return answer.text

    async def check(self, template: str, variables: Mapping[str, Any]) -> None:
        """Raises TEMPLATE_FAILED if the template exceeds the limits.

        A template that only rejects these variables passes: some require an order of roles.
        """
        answer = await self._request(template, variables)
        if answer.cause == _LIMITS:
            raise _failed(answer.message)

    async def _request(self, template: str, variables: Mapping[str, Any]) -> _Answer:
        try:
            body = json.dumps({"template": template, "variables": dict(variables)}).encode() + b"\n"
        except RecursionError:
            raise _failed("the conversation is nested too deeply") from None
        if len(body) > MAX_REQUEST_BYTES:
            raise _failed(f"it and the conversation are over {MAX_REQUEST_BYTES} bytes")
        async with self._turn:
            for _ in range(_TRIES):
                answer = await self._once(body)
                if answer is not None:
                    return answer
        raise WeftError(
            Reason.INTERNAL, "the process that renders chat templates was killed, perhaps because memory ran out"
        )

    async def _once(self, body: bytes) -> _Answer | None:
        """Returns the answer of the process; None: it was killed from outside, which is not the template's fault."""
        process = await self._ready_process()
        answer = None
        try:
            answer = await self._exchange(process, body)
            if self._process is not process:
                raise WeftError(Reason.WORKER_RESTARTED, "the engine was stopped while it processed the request")
            return answer
        finally:
            # A process that reached its limits may be in any state.
            if answer is None or answer.cause == _LIMITS:
                await self._end(process)

    async def _exchange(self, process: asyncio.subprocess.Process, body: bytes) -> _Answer | None:
        requests, answers = _pipes(process)
        try:
            async with asyncio.timeout(self._wall_seconds):
                with suppress(OSError):
                    requests.write(body)
                    await requests.drain()
                if line := await answers.readline():
                    return self._decoder.decode(line)
                # A template can end its process in many ways, but SIGKILL comes from the kernel or a person.
                if await process.wait() == -signal.SIGKILL:
                    return None
        except TimeoutError:
            return _Answer(cause=_LIMITS, message=f"it takes longer than {self._wall_seconds:g} s")
        except (ValueError, msgspec.DecodeError):
            return _Answer(cause=_LIMITS, message="it writes too much")
        return _Answer(cause=_LIMITS, message="it ended the process that renders it")

    async def _ready_process(self) -> asyncio.subprocess.Process:
        if self._process is not None:
            if self._process.returncode is None:
                return self._process
            await self._end(self._process)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", _WORKER, str(os.getpid())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                limit=MAX_ANSWER_BYTES,
                env={name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ},
                start_new_session=True,
            )
        except OSError as error:
            raise WeftError(
                Reason.INTERNAL, f"the process that renders chat templates cannot be started: {error.strerror}"
            ) from error
        self._process, is_ready = process, b""
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(START_SECONDS):
                    is_ready = await _pipes(process)[1].readline()
        finally:
            if not is_ready:
                await self._end(process)
        if not is_ready:
            raise WeftError(Reason.INTERNAL, "the process that renders chat templates did not start")
        return process

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        if self._process is process:
            self._process = None
        with suppress(ProcessLookupError):
            process.kill()
        _pipes(process)[0].close()
        await process.wait()


def _pipes(process: asyncio.subprocess.Process) -> tuple[asyncio.StreamWriter, asyncio.StreamReader]:
    assert process.stdin is not None, "it is a pipe"
    assert process.stdout is not None, "it is a pipe"
    return process.stdin, process.stdout


def _failed(why: str) -> WeftError:
    return WeftError(Reason.TEMPLATE_FAILED, f"the chat template cannot be used: {why}")


TOOL_USE = "tool_use"
"""Name of the additional template in model files for requests with tools."""
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
    """Other templates in the file, which an engine may use."""

    @property
    def all(self) -> tuple[str, ...]:
        """All templates that an engine may choose."""
        found = (self.usual, self.tool_use, *self.others)
        return tuple(template for template in found if template is not None)

    def pick(self, has_tools: bool) -> str | None:
        """Returns the template for a request."""
        return self.tool_use if has_tools and self.tool_use is not None else self.usual


async def read_templates(model_path: Path, override: Path | None) -> ModelTemplates:
    """Reads the templates of a model file, or only the one in `override`.

    Raises INVALID_ARGUMENT for a malformed GGUF file, or for an override that is not text or exceeds MAX_TEXT_BYTES;
    CONNECT_FAILED for an unreadable file. A file of another format has no templates: the engine decides whether it can
    use it.
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
    """Renders each template once with a sample conversation, before an engine without a sandbox uses it.

    Raises TEMPLATE_FAILED for one that exceeds the sandbox's limits. One that only rejects the sample passes.
    """
    tokens = {"bos_token": templates.bos_token, "eos_token": templates.eos_token}
    for template in templates.all:
        await sandbox.check(template, {**_SAMPLE, **tokens})


async def check_before_load(model_path: Path, override: Path | None) -> ModelTemplates:
    """Checks and returns the templates of a model whose engine renders them itself; takes 0.15 s.

    Raises as `read_templates` and `check_templates`, except for an unreadable model file: the engine's error is better.
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
