"""Which clients are tried, and with what: this table is what the run must confirm, feature by feature."""

import json
import re
from dataclasses import dataclass

from client_environments import BROWSER, FOLDER

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "embed": "/api/embed",
    "embedone": "/api/embeddings",
    "embeddings": "/v1/embeddings",
    "generate": "/api/generate",
    "messages": "/v1/messages",
    "models": "/v1/models",
    "ps": "/api/ps",
    "pull": "/api/pull",
    "responses": "/v1/responses",
    "show": "/api/show",
    "tags": "/api/tags",
    "talk": "/api/chat",
}
"""What a client asks for where a feature is of that surface."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A third-party client, unmodified."""

    name: str
    """The folder of its check and pins."""
    title: str
    package: str
    """On PyPI or npm."""
    features: tuple[str, ...]
    """What its check must report, in that order: `<surface>.<feature>`."""
    keys: tuple[str, ...] = ("Bearer",)
    """How it sends its key where it is left to itself, seen on the wire."""
    real: tuple[str, ...] = ()
    """Features tried on the real model as well."""
    unbounded: bool = False
    """Whether it sets no bound on an answer."""
    in_browser: bool = False
    """Whether its check needs the browser of the environment BROWSER."""

    @property
    def surfaces(self) -> tuple[str, ...]:
        """The APIs that it uses, in the order of its features."""
        return tuple(dict.fromkeys(feature.partition(".")[0] for feature in self.features))

    @property
    def version(self) -> str:
        """As pinned."""
        pins = FOLDER / self.name / "requirements.txt"
        if not pins.exists():
            return str(json.loads((FOLDER / self.name / "package.json").read_text())["dependencies"][self.package])
        found = re.search(rf"^{re.escape(self.package)}(?:\[[^]]*\])?==([^\s;]+)", pins.read_text(), re.MULTILINE)
        assert found, f"{pins} does not pin {self.package}"
        return found[1]


CLIENTS: tuple[Client, ...] = (
    Client(
        name="openai-python",
        title="OpenAI Python SDK",
        package="openai",
        features=(
            "chat.text",
            "chat.stream",
            "chat.several",
            "chat.tools",
            "chat.tool_stream",
            "chat.structured",
            "chat.reasoning",
            "chat.async",
            "chat.errors",
            "chat.key",
            "chat.image",
            "chat.broken_stream",
            "chat.cut_answer",
            "chat.refused_image",
            "completions.text",
            "embeddings.vectors",
            "responses.text",
            "responses.stream",
            "responses.tools",
            "responses.tool_stream",
            "responses.stored",
            "responses.structured",
            "responses.reasoning",
            "responses.errors",
            "responses.broken_stream",
            "responses.cut_answer",
            "models.list",
        ),
        real=("chat.text", "chat.stream"),
    ),
    Client(
        name="openai-node",
        title="OpenAI Node SDK",
        package="openai",
        features=(
            "chat.text",
            "chat.stream",
            "chat.tools",
            "chat.runner",
            "chat.structured",
            "chat.reasoning",
            "chat.errors",
            "chat.key",
            "chat.broken_stream",
            "chat.cut_answer",
            "embeddings.vectors",
            "responses.text",
            "responses.stream",
            "responses.tools",
            "responses.structured",
            "responses.broken_stream",
            "responses.cut_answer",
            "models.list",
        ),
        real=("chat.text", "chat.stream", "responses.stream"),
    ),
    Client(
        name="anthropic-python",
        title="Anthropic Python SDK",
        package="anthropic",
        features=(
            "messages.text",
            "messages.stream",
            "messages.tools",
            "messages.tool_stream",
            "messages.runner",
            "messages.structured",
            "messages.thinking",
            "messages.count",
            "messages.errors",
            "messages.key",
            "messages.broken_stream",
            "messages.cut_answer",
            "models.list",
        ),
        real=("messages.text", "messages.stream"),
    ),
    Client(
        name="litellm",
        title="LiteLLM",
        package="litellm",
        features=(
            "chat.text",
            "chat.stream",
            "chat.tools",
            "chat.tool_stream",
            "chat.structured",
            "chat.reasoning",
            "chat.errors",
            "chat.broken_stream",
            "completions.text",
            "messages.text",
            "messages.stream",
            "embeddings.vectors",
        ),
        keys=("Bearer", "x-api-key"),
    ),
    Client(
        name="langchain-openai",
        title="LangChain with LangGraph",
        package="langchain-openai",
        features=(
            "chat.text",
            "chat.stream",
            "chat.async",
            "chat.tools",
            "chat.agent",
            "chat.structured",
            "chat.errors",
            "chat.broken_stream",
            "responses.text",
            "responses.stream",
            "responses.agent",
            "responses.structured",
            "embeddings.vectors",
        ),
    ),
    Client(
        name="langchain-js",
        title="LangChain.js",
        package="@langchain/openai",
        features=(
            "chat.text",
            "chat.stream",
            "chat.tools",
            "chat.structured",
            "chat.errors",
            "chat.broken_stream",
            "responses.text",
            "responses.stream",
            "responses.tools",
            "embeddings.vectors",
        ),
    ),
    Client(
        name="llama-index",
        title="LlamaIndex",
        package="llama-index-llms-openai-like",
        features=(
            "chat.text",
            "chat.stream",
            "chat.tools",
            "chat.structured",
            "chat.errors",
            "chat.broken_stream",
            "completions.text",
            "embeddings.vectors",
        ),
    ),
    Client(
        name="llama-index-ollama",
        title="LlamaIndex for Ollama",
        package="llama-index-llms-ollama",
        features=(
            "talk.text",
            "talk.stream",
            "talk.async",
            "talk.tools",
            "talk.structured",
            "talk.thinking",
            "talk.errors",
            "talk.broken_stream",
            "embed.vectors",
        ),
    ),
    Client(
        name="pydantic-ai",
        title="Pydantic AI",
        package="pydantic-ai-slim",
        features=(
            "chat.text",
            "chat.stream",
            "chat.agent",
            "chat.typed",
            "chat.structured",
            "chat.reasoning",
            "chat.errors",
            "chat.broken_stream",
            "responses.text",
            "responses.stream",
            "responses.agent",
            "responses.typed",
            "responses.reasoning",
        ),
    ),
    Client(
        name="dspy",
        title="DSPy",
        package="dspy",
        features=("chat.text", "chat.stream", "chat.structured", "chat.tools", "chat.errors", "embeddings.vectors"),
    ),
    Client(
        name="openai-agents",
        title="OpenAI Agents SDK",
        package="openai-agents",
        features=(
            "chat.text",
            "chat.stream",
            "chat.agent",
            "chat.structured",
            "chat.errors",
            "chat.broken_stream",
            "responses.text",
            "responses.stream",
            "responses.agent",
            "responses.handoff",
            "responses.structured",
            "responses.broken_stream",
        ),
    ),
    Client(
        name="vercel-ai",
        title="Vercel AI SDK",
        package="ai",
        features=(
            "chat.text",
            "chat.stream",
            "chat.tools",
            "chat.tool_stream",
            "chat.structured",
            "chat.reasoning",
            "chat.errors",
            "chat.broken_stream",
            "responses.text",
            "responses.stream",
            "responses.tools",
            "responses.structured",
            "embeddings.vectors",
        ),
    ),
    Client(
        name="huggingface-hub",
        title="Hugging Face InferenceClient",
        package="huggingface-hub",
        features=("chat.text", "chat.stream", "chat.tools", "chat.structured", "chat.errors", "chat.broken_stream"),
    ),
    Client(
        name="llm",
        title="llm",
        package="llm",
        features=("chat.text", "chat.stream", "chat.tools", "chat.structured", "chat.errors", "chat.broken_stream"),
    ),
    Client(
        name="aider",
        title="Aider",
        package="aider-chat",
        features=("chat.stream", "chat.text", "chat.errors"),
    ),
    Client(
        name="codex",
        title="Codex CLI",
        package="@openai/codex",
        features=("responses.stream", "responses.agent", "responses.errors"),
        real=("responses.stream",),
        unbounded=True,
    ),
    Client(
        name="claude-code",
        title="Claude Code",
        package="@anthropic-ai/claude-code",
        features=("messages.stream", "messages.agent", "messages.errors"),
    ),
    Client(
        name="opencode",
        title="opencode",
        package="opencode-ai",
        features=("chat.stream", "chat.agent", "chat.errors"),
    ),
    Client(
        name="ollama-python",
        title="Ollama Python library",
        package="ollama",
        features=(
            "talk.text",
            "talk.stream",
            "talk.tools",
            "talk.tool_stream",
            "talk.structured",
            "talk.thinking",
            "talk.image",
            "talk.async",
            "talk.launched",
            "talk.errors",
            "talk.key",
            "talk.broken_stream",
            "talk.cut_answer",
            "generate.text",
            "generate.thinking",
            "generate.stream",
            "generate.raw",
            "embed.vectors",
            "embedone.vector",
            "tags.list",
            "show.model",
            "ps.list",
            "pull.model",
            "pull.refused",
        ),
        real=("talk.text", "talk.stream", "generate.text"),
    ),
    Client(
        name="ollama-js",
        title="Ollama JavaScript library",
        package="ollama",
        features=(
            "talk.text",
            "talk.stream",
            "talk.tools",
            "talk.structured",
            "talk.thinking",
            "talk.errors",
            "talk.key",
            "talk.abort",
            "talk.broken_stream",
            "talk.cut_answer",
            "generate.text",
            "generate.stream",
            "embed.vectors",
            "tags.list",
            "show.model",
            "ps.list",
            "pull.model",
            "pull.refused",
        ),
        real=("talk.text", "talk.stream"),
    ),
    Client(
        name="open-webui",
        title="Open WebUI",
        package="open-webui",
        features=(
            "models.list",
            "chat.stream",
            "embeddings.vectors",
            "embeddings.document",
            "tags.list",
            "talk.stream",
            "embed.vectors",
        ),
        in_browser=True,
    ),
    Client(
        name=BROWSER,
        title="Web page in a browser",
        package="playwright-core",
        features=("models.list", "models.other_origin", "chat.stream", "chat.other_origin", "talk.stream"),
        in_browser=True,
    ),
)
