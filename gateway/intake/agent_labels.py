"""Labels of requests from coding agents: which program asks, whether for a sub-agent, and for what purpose. Pure.

Recognized by what the programs send by themselves (measured in November 2026). Anyone can send the same: the labels say
what a request claims, and grant nothing.
"""

from collections.abc import Mapping, Sequence

from gateway.request_facts import Headers

PROGRAM, AGENT, PURPOSE = "program", "agent", "purpose"
"""Names of the labels: `AGENT_LABELS`."""
MAIN, SUB = "main", "sub"
"""Values of AGENT."""
TURN, TITLE, SEARCH, COMPACTION = "turn", "title", "search", "compaction"
"""Values of PURPOSE: a turn of the conversation, or a side call about it."""

_PROGRAMS = {b"claude-cli/": "claude-code", b"codex": "codex", b"opencode/": "opencode", b"QwenCode/": "qwen-code"}
"""Programs by the beginning of their User-Agent."""
PREFIXES = (*_PROGRAMS, b"ai-sdk/")
"""Beginnings of a User-Agent that may be of such a program; Cline sends that of a library."""
_COPILOT, _COPILOT_BY = b"x-interaction-type", b"x-initiator"
_OF_SUB_AGENTS = (b"x-claude-code-agent-id", b"x-openai-subagent", b"x-codex-parent-thread-id", b"x-parent-session-id")
_CODEX_TURN = b"x-codex-turn-metadata"
HEADERS = frozenset({_COPILOT, _COPILOT_BY, _CODEX_TURN, *_OF_SUB_AGENTS})
"""Headers that only these programs send."""
_SAID_BY_SUB_AGENTS = ("cc_is_subagent=true", "You are a general-purpose subagent")
_SYSTEM_TEXTS = {
    "You are naming a coding session": TITLE,
    "You are a title generator": TITLE,
    "You run a web search for another Claude model": SEARCH,
    "You are a context summarization agent": COMPACTION,
}
"""Purposes by a sentence of the system message."""
_LAST_TEXTS = {
    "CRITICAL: Respond with TEXT ONLY": COMPACTION,
    "You are performing a CONTEXT CHECKPOINT COMPACTION": COMPACTION,
}
"""Purposes by the beginning of the user's last text."""
_SYSTEM = frozenset({"system", "developer"})
MAX_SYSTEM_CHARS = 4_000
"""Characters of the system message that are searched."""


Turn = tuple[str | None, object]
"""The role and content of a turn: a text, or parts of which some have a `text`."""


def agent_labels(headers: Headers, turns: Sequence[Turn]) -> Mapping[str, str]:
    """Returns the labels of a request; empty: it is of no known program."""
    of_system = (text for role, content in turns if role in _SYSTEM for text in _texts(content))
    system = "\n".join(of_system)[:MAX_SYSTEM_CHARS]
    last = next((_texts(content) for role, content in reversed(turns) if role == "user"), [])
    program = _program(headers, system)
    is_sub = any(name in headers for name in _OF_SUB_AGENTS) or headers.get(_COPILOT) == b"conversation-subagent"
    is_sub = is_sub or any(text in system for text in _SAID_BY_SUB_AGENTS)
    if not program and not is_sub:
        return {}
    labels = {AGENT: SUB if is_sub else MAIN, PURPOSE: _purpose(headers, system, last)}
    return {PROGRAM: program, **labels} if program else labels


def _program(headers: Headers, system: str) -> str:
    agent = headers.get(b"user-agent", b"")
    for prefix, program in _PROGRAMS.items():
        if agent.startswith(prefix):
            return program
    if _COPILOT in headers or _COPILOT_BY in headers:
        return "copilot"
    return "cline" if system.startswith("You are Cline") else ""


def _texts(content: object) -> list[str]:
    if isinstance(content, str):
        return [content]
    found = (getattr(part, "text", None) for part in (content if isinstance(content, Sequence) else ()))
    return [text for text in found if isinstance(text, str)]


def _purpose(headers: Headers, system: str, last: Sequence[str]) -> str:
    for text, purpose in _SYSTEM_TEXTS.items():
        if text in system:
            return purpose
    for text, purpose in _LAST_TEXTS.items():
        if any(part.startswith(text) for part in last):
            return purpose
    # The header is JSON, whose other members are of no use here.
    is_codex_compaction = b'"request_kind":"compaction"' in headers.get(_CODEX_TURN, b"").replace(b" ", b"")
    return COMPACTION if is_codex_compaction else TURN
