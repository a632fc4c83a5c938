"""Short names of well-known models, and the hub repositories with their GGUF files.

Names are those of Ollama's library; without a size, the most common size is meant. Repositories belong to the model's
makers or to a publisher of many models. The lookup needs no network.
"""

from collections.abc import Mapping
from types import MappingProxyType

from weft.kernel.models.model_source import LATEST_TAG
from weft.kernel.values.names import closest_names, did_you_mean

SHORT_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "deepseek-r1": "hf:bartowski/DeepSeek-R1-Distill-Qwen-7B-GGUF:Q4_K_M",
        "gemma3": "hf:ggml-org/gemma-3-4b-it-GGUF:Q4_K_M",
        "gemma3:1b": "hf:ggml-org/gemma-3-1b-it-GGUF:Q4_K_M",
        "gemma3:12b": "hf:ggml-org/gemma-3-12b-it-GGUF:Q4_K_M",
        "gpt-oss": "hf:ggml-org/gpt-oss-20b-GGUF",
        "llama3.1": "hf:bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q4_K_M",
        "llama3.2": "hf:bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M",
        "llama3.2:1b": "hf:bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M",
        "llama3.3": "hf:bartowski/Llama-3.3-70B-Instruct-GGUF:Q4_K_M",
        "mistral": "hf:bartowski/Mistral-7B-Instruct-v0.3-GGUF:Q4_K_M",
        "mistral-nemo": "hf:bartowski/Mistral-Nemo-Instruct-2407-GGUF:Q4_K_M",
        "mistral-small": "hf:bartowski/Mistral-Small-24B-Instruct-2501-GGUF:Q4_K_M",
        "nomic-embed-text": "hf:nomic-ai/nomic-embed-text-v1.5-GGUF:Q8_0",
        "phi4": "hf:bartowski/phi-4-GGUF:Q4_K_M",
        "qwen2.5": "hf:bartowski/Qwen2.5-7B-Instruct-GGUF:Q4_K_M",
        "qwen2.5:0.5b": "hf:bartowski/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M",
        "qwen2.5:1.5b": "hf:bartowski/Qwen2.5-1.5B-Instruct-GGUF:Q4_K_M",
        "qwen2.5:3b": "hf:bartowski/Qwen2.5-3B-Instruct-GGUF:Q4_K_M",
        "qwen2.5-coder": "hf:bartowski/Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M",
        "qwen3": "hf:Qwen/Qwen3-8B-GGUF:Q4_K_M",
        "qwen3:0.6b": "hf:Qwen/Qwen3-0.6B-GGUF:Q8_0",
        "qwen3:4b": "hf:Qwen/Qwen3-4B-GGUF:Q4_K_M",
        "smollm2": "hf:bartowski/SmolLM2-1.7B-Instruct-GGUF:Q4_K_M",
        "smollm2:135m": "hf:bartowski/SmolLM2-135M-Instruct-GGUF:Q4_K_M",
        "smollm2:360m": "hf:bartowski/SmolLM2-360M-Instruct-GGUF:Q4_K_M",
    }
)


def short_source(name: str) -> str | None:
    """Returns the source for a short name, ignoring case and `:latest`; None if it is unknown."""
    return SHORT_NAMES.get(name.lower().removesuffix(f":{LATEST_TAG}"))


def short_names_hint(name: str) -> str:
    """Returns a hint with similar short names, or where to find the list."""
    return did_you_mean(closest_names(name, SHORT_NAMES)) or "docs/models.md lists them, and any hf:OWNER/REPO works"
