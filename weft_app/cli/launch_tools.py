"""The programs that `weft launch` starts, and the environment that points each at the mesh. Pure."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

CODEX_KEY = "WEFT_API_KEY"
"""Variable from which codex reads the key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The parameters of a program."""

    url: str
    """Without `/v1`."""
    key: str
    model: str
    """The model's name in requests."""
    context_tokens: int = 0
    """The model's context window, which coding agents otherwise guess far too large; 0: unknown."""

    @property
    def v1(self) -> str:
        """Base URL of the OpenAI API."""
        return f"{self.url}/v1"


def _nothing(_: Access) -> list[str]:
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A program that uses one of the mesh's APIs. weft writes none of its files."""

    title: str
    program: str
    install: str
    environment: Callable[[Access], Mapping[str, str]]
    arguments: Callable[[Access], list[str]] = _nothing
    """Arguments before those of the caller."""
    calls_tools: bool = False
    """Whether every request offers tools, which not all models can call."""


COMPACTION_SHARE = 0.8
"""Share of the context window from which Codex compacts a conversation: the rest holds one more turn and a summary."""
MAX_OPENCODE_ANSWER = 32_000
"""Tokens of an answer that opencode asks for at most."""


def _claude(access: Access) -> Mapping[str, str]:
    window = {"CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(access.context_tokens)} if access.context_tokens else {}
    return window | {
        "ANTHROPIC_BASE_URL": access.url,
        "ANTHROPIC_AUTH_TOKEN": access.key,
        "ANTHROPIC_SMALL_FAST_MODEL": access.model,
        # Its billing header differs in every request and would prevent caching of the prompt's prefix.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def _codex_arguments(access: Access) -> list[str]:
    provider = f'{{name="weft", base_url="{access.v1}", env_key="{CODEX_KEY}", wire_api="responses"}}'
    settings = ['model_provider="weft"', f"model_providers.weft={provider}", 'web_search="disabled"']
    if window := access.context_tokens:
        settings += [
            f"model_context_window={window}",
            f"model_auto_compact_token_limit={int(window * COMPACTION_SHARE)}",
        ]
    return [*(part for setting in settings for part in ("-c", setting)), "--model", access.model]


def _opencode(access: Access) -> Mapping[str, str]:
    window = access.context_tokens
    limit = {"limit": {"context": window, "output": min(window // 4, MAX_OPENCODE_ANSWER)}} if window else {}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "weft",
        "options": {"baseURL": access.v1, "apiKey": access.key},
        "models": {access.model: {"name": access.model, **limit}},
    }
    config = {"provider": {"weft": provider}, "small_model": f"weft/{access.model}"}
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(config, separators=(",", ":"))}


def _openai(access: Access) -> dict[str, str]:
    return {"OPENAI_BASE_URL": access.v1, "OPENAI_API_BASE": access.v1, "OPENAI_API_KEY": access.key}


def _open_webui(access: Access) -> Mapping[str, str]:
    return {
        "OPENAI_API_BASE_URL": access.v1,
        "OPENAI_API_KEY": access.key,
        # The same models over both APIs would be listed twice.
        "ENABLE_OLLAMA_API": "false",
    }


TOOLS: Mapping[str, Tool] = MappingProxyType(
    {
        "claude": Tool(
            title="Claude Code",
            program="claude",
            install="npm install -g @anthropic-ai/claude-code",
            environment=_claude,
            calls_tools=True,
            arguments=lambda access: ["--model", access.model],
        ),
        "codex": Tool(
            title="Codex CLI",
            program="codex",
            install="npm install -g @openai/codex",
            environment=lambda access: {CODEX_KEY: access.key},
            calls_tools=True,
            arguments=_codex_arguments,
        ),
        "opencode": Tool(
            title="opencode",
            program="opencode",
            install="npm install -g opencode-ai",
            environment=_opencode,
            calls_tools=True,
            arguments=lambda access: ["--model", f"weft/{access.model}"],
        ),
        "aider": Tool(
            title="Aider",
            program="aider",
            install="pipx install aider-chat",
            environment=_openai,
            arguments=lambda access: ["--model", f"openai/{access.model}"],
        ),
        "openwebui": Tool(
            title="Open WebUI",
            program="open-webui",
            install="pipx install open-webui",
            environment=_open_webui,
            arguments=lambda _: ["serve"],
        ),
        "ollama": Tool(
            title="Ollama's command line",
            program="ollama",
            install="see https://ollama.com/download",
            environment=lambda access: {"OLLAMA_HOST": access.url, "OLLAMA_API_KEY": access.key},
            arguments=lambda access: ["run", access.model],
        ),
    }
)
