"""The behavior of the fake: answers, timing, and every fault that can be switched on."""

from typing import Annotated, Any, Literal

import msgspec

MAX_TEXT_CHARS = 1024 * 1024
MAX_EVENT_BYTES = 64 * 1024 * 1024

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT_CHARS)]
EventBytes = Annotated[int, msgspec.Meta(ge=0, le=MAX_EVENT_BYTES)]
CrashSignal = Literal["SIGKILL", "SIGSEGV", "SIGILL", "SIGBUS", "SIGFPE", "SIGABRT"]
HttpStatus = Annotated[int, msgspec.Meta(ge=400, le=599)]


class ScriptedCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A scripted tool call of the model."""

    name: Text
    arguments: Text = "{}"
    """The exact text of the arguments, which may be invalid JSON."""


class ScriptedTurn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of the model: its text, then its tool calls."""

    text: Text = ""
    calls: tuple[ScriptedCall, ...] = ()
    """Sent if the request offers tools."""


class Behaviour(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All switches; defaults are normal service. Token counts are per request, over all its choices."""

    tokens_per_second: Seconds = 0.0
    """Decode speed; 0: as fast as possible, many events per write."""
    answer_tokens: Count = 16
    """Length of the counted answer ("tok0 tok1 ..."); 0: endless, limited by `max_tokens` or the context."""
    echo: bool = False
    """Answer with the last user message (chat) or the prompt (completion)."""
    text: Text | None = None
    """Answer every request with this text."""
    reasoning_text: Text = ""
    """Chat: send this first, as `reasoning_content`."""
    tool_call: ScriptedCall | tuple[ScriptedCall, ...] | None = None
    """Chat: call this instead of answering, if the request offers tools and its last message is not a tool result."""
    turns: tuple[ScriptedTurn, ...] = ()
    """Chat: the answers after the last user message, one per model turn; the last one is repeated for further turns."""

    load_seconds: Seconds = 0.0
    """Time from the start of the process until /health is 200."""
    never_healthy: bool = False
    """/health and everything else return 503 forever."""
    exit_at_start: Annotated[int, msgspec.Meta(ge=0, le=255)] | None = None
    """Exit with this code: before listening or, if `load_seconds` is set, that long after the start without becoming
    healthy."""
    out_of_memory_at_start: bool = False
    """Print llama.cpp's messages for a model that does not fit, and exit with code 1 before listening."""
    crash_at_start: bool = False
    """End the process by `crash_signal` before listening."""
    ignore_sigterm: bool = False
    fork_grandchild: bool = False
    """Start a process that holds stdout and stderr open, at start or when switched on."""
    grandchild_setsid: bool = False
    """Let that process leave the process group and the session."""
    stderr_flood_bytes: EventBytes = 0
    """Write this many bytes to stderr, blocking, at start and whenever it is set."""

    forgets_restored: bool = False
    """Report restored slots, and process their prompts again (llama.cpp#26676)."""
    close_after_stream: bool = False
    """Close the connection after every stream despite keep-alive, as llama-server does."""
    slow_headers_seconds: Seconds = 0.0
    """Idle silence before the response headers and before taking a slot."""
    prefill_seconds: Seconds = 0.0
    """Silence between taking a slot and the first token; burns some CPU. Headers follow it, as in llama-server."""
    hurries: bool = False
    """Ignore the speed limit, including for running requests."""
    prefill_held: bool = False
    """Extend prefill until this is switched off, including for running requests."""
    prefill_idle: bool = False
    prefill_progress: Count = 2
    """Number of `prompt_progress` chunks during prefill if the request asks with `return_progress`."""
    keepalive_comments: bool = False
    """Send headers immediately, and a ":" comment line during every silence, including stalls."""
    stall_after_tokens: Count | None = None
    """Stall, idle, after this many tokens; 0: before the headers."""
    crash_after_tokens: Count | None = None
    """End the process by `crash_signal` after this many tokens; 0: before the headers."""
    crash_signal: CrashSignal = "SIGKILL"
    """The signal of a crash; SIGILL and SIGSEGV simulate a build for another processor."""
    out_of_memory_after_tokens: Count | None = None
    """Print llama.cpp's messages for exhausted memory, and abort, after this many tokens; 0: before the headers."""
    close_after_tokens: Count | None = None
    """Close the socket after this many tokens, without a finish reason and the end of the body."""
    repeat_line: Text = ""
    """Answer with this line repeatedly, until `max_tokens` or the context ends it."""
    html_200: bool = False
    """Answer with status 200 and an HTML page, like a captive portal."""
    raw_answer: Text | None = None
    """Write these characters as Latin-1 bytes instead of any answer, and close the connection; empty: reset it."""
    status: HttpStatus | None = None
    """Answer with this status instead of working."""
    status_body: Text | None = None
    """Body of that answer; None: an error object like llama-server's."""
    text_only_status: HttpStatus | None = None
    """Chat: reject images and audio with this status and llama-server's message; None: ignore them."""
    retry_after_seconds: Count | None = None
    """`Retry-After` header of that answer."""
    fail_times: Count | None = None
    """Number of requests affected by the switches of `REQUEST_FAULTS`; None: all."""

    @property
    def scripted_calls(self) -> tuple[ScriptedCall, ...]:
        """`tool_call` as a tuple."""
        if self.tool_call is None:
            return ()
        return (self.tool_call,) if isinstance(self.tool_call, ScriptedCall) else self.tool_call


REQUEST_FAULTS = frozenset(
    {
        "slow_headers_seconds",
        "prefill_seconds",
        "stall_after_tokens",
        "crash_after_tokens",
        "out_of_memory_after_tokens",
        "close_after_tokens",
        "repeat_line",
        "html_200",
        "raw_answer",
        "status",
    }
)
"""The switches that `fail_times` counts down."""

_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(Behaviour)}


def updated(behaviour: Behaviour, changes: dict[str, Any], *, strict: bool = True) -> Behaviour:
    """Returns `behaviour` with changed switches; `strict=False` also accepts numbers as text.

    Raises msgspec.ValidationError for an unknown switch or a value out of range.
    """
    return msgspec.convert({**msgspec.to_builtins(behaviour), **changes}, Behaviour, strict=strict)


class Control:
    """The current behavior, and the number of requests that will still fail."""

    def __init__(self, behaviour: Behaviour) -> None:
        self._set(behaviour)

    @property
    def behaviour(self) -> Behaviour:
        """The current switches."""
        return self._behaviour

    def update(self, changes: dict[str, Any]) -> Behaviour:
        """Changes some switches and restarts the count of `fail_times`. Raises msgspec.ValidationError."""
        self._set(updated(self._behaviour, changes))
        return self._behaviour

    def for_next_request(self) -> Behaviour:
        """Returns the behaviour for a request that starts now."""
        if self._faults_left is None or self._is_healthy:
            return self._behaviour
        if self._faults_left == 0:
            return self._without_faults
        self._faults_left -= 1
        return self._behaviour

    def _set(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour
        self._faults_left = behaviour.fail_times
        self._without_faults = updated(behaviour, {name: _DEFAULTS[name] for name in REQUEST_FAULTS})
        self._is_healthy = self._without_faults == behaviour
