"""Which clients are tried. The features of each are the functions of its check; the run must confirm all of them."""

import json
import re
from dataclasses import dataclass

from client_environments import BROWSER, FOLDER

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "edits": "/v1/images/edits",
    "embed": "/api/embed",
    "embedone": "/api/embeddings",
    "embeddings": "/v1/embeddings",
    "generate": "/api/generate",
    "images": "/v1/images/generations",
    "messages": "/v1/messages",
    "models": "/v1/models",
    "ps": "/api/ps",
    "pull": "/api/pull",
    "responses": "/v1/responses",
    "show": "/api/show",
    "speech": "/v1/audio/speech",
    "tags": "/api/tags",
    "talk": "/api/chat",
    "transcriptions": "/v1/audio/transcriptions",
    "translations": "/v1/audio/translations",
}
"""What a client asks for where a feature is of that surface."""
_CHECK = re.compile(rf'^(?:(?:async )?def | *")({"|".join(PATHS)})[_.](\w+)(?:\(|":)', re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A third-party client, unmodified."""

    name: str
    """The folder of its check and pins."""
    title: str
    package: str
    """On PyPI or npm."""
    keys: tuple[str, ...] = ("Bearer",)
    """How it sends its key where it is left to itself, seen on the wire."""
    real: tuple[str, ...] = ()
    """Features tried on the real model as well."""
    unbounded: bool = False
    """Whether it sets no bound on an answer."""
    in_browser: bool = False
    """Whether its check needs the browser of the environment BROWSER."""

    @property
    def features(self) -> tuple[str, ...]:
        """What its check must report, in the order in which it is written there: `<surface>.<feature>`."""
        script = next(path for name in ("check.py", "check.mjs") if (path := FOLDER / self.name / name).exists())
        return tuple(f"{surface}.{feature}" for surface, feature in _CHECK.findall(script.read_text()))

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
    Client(name="openai-python", title="OpenAI Python SDK", package="openai", real=("chat.text", "chat.stream")),
    Client(
        name="openai-node",
        title="OpenAI Node SDK",
        package="openai",
        real=("chat.text", "chat.stream", "responses.stream"),
    ),
    Client(
        name="anthropic-python",
        title="Anthropic Python SDK",
        package="anthropic",
        real=("messages.text", "messages.stream"),
    ),
    Client(name="litellm", title="LiteLLM", package="litellm", keys=("Bearer", "x-api-key")),
    Client(name="langchain-openai", title="LangChain with LangGraph", package="langchain-openai"),
    Client(name="langchain-js", title="LangChain.js", package="@langchain/openai"),
    Client(name="llama-index", title="LlamaIndex", package="llama-index-llms-openai-like"),
    Client(name="llama-index-ollama", title="LlamaIndex for Ollama", package="llama-index-llms-ollama"),
    Client(name="pydantic-ai", title="Pydantic AI", package="pydantic-ai-slim"),
    Client(name="dspy", title="DSPy", package="dspy"),
    Client(name="openai-agents", title="OpenAI Agents SDK", package="openai-agents"),
    Client(name="vercel-ai", title="Vercel AI SDK", package="ai"),
    Client(name="huggingface-hub", title="Hugging Face InferenceClient", package="huggingface-hub"),
    Client(name="llm", title="llm", package="llm"),
    Client(name="aider", title="Aider", package="aider-chat"),
    Client(name="codex", title="Codex CLI", package="@openai/codex", real=("responses.stream",), unbounded=True),
    Client(name="claude-code", title="Claude Code", package="@anthropic-ai/claude-code"),
    Client(name="opencode", title="opencode", package="opencode-ai"),
    Client(name="qwen-code", title="Qwen Code", package="@qwen-code/qwen-code"),
    Client(name="cline", title="Cline", package="cline"),
    Client(
        name="ollama-python",
        title="Ollama Python library",
        package="ollama",
        real=("talk.text", "talk.stream", "generate.text"),
    ),
    Client(name="ollama-js", title="Ollama JavaScript library", package="ollama", real=("talk.text", "talk.stream")),
    Client(name="open-webui", title="Open WebUI", package="open-webui", in_browser=True),
    Client(name=BROWSER, title="Web page in a browser", package="playwright-core", in_browser=True),
)
