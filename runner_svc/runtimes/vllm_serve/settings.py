"""The settings of a model of `vllm serve` in `weft.yaml`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import MaxLen
from typing_extensions import override

from runner_svc.runtimes.settings import MAX_ADAPTERS, AdapterSettings
from runner_svc.runtimes.vllm_engine.settings import ModelId, VllmModel, Word
from weft.kernel.settings import PUBLIC

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmAdapter(AdapterSettings):
    """An adapter of a model of vLLM's server: a model of its own, which shares the engine of that model."""

    path: Annotated[ModelId, PUBLIC]
    """A folder with `adapter_config.json` and `adapter_model.safetensors`, as PEFT writes it, or an id of the hub."""

    @property
    def folder(self) -> Path | None:
        """The folder, by its whole path; None: it is not on this machine, or in the cache of the hub."""
        path = Path(self.path).expanduser()
        return path if path.is_dir() else None

    @property
    @override
    def digested_file(self) -> Path | None:
        folder = self.folder
        return None if folder is None else folder / ADAPTER_WEIGHTS


def local_or_id(path: str) -> str:
    """Returns the whole path of a folder, or the id of the hub as it is."""
    folder = Path(path).expanduser()
    return str(folder) if folder.is_dir() else path


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmServeModel(VllmModel):
    """A model that a `vllm serve` of its own serves.

    `context_tokens` is vLLM's `max_model_len`, and `slots` its `max_num_seqs`: set few for one user, since vLLM
    reserves memory for CUDA graphs by their number.
    """

    tool_call_parser: Annotated[Word, PUBLIC] | None = None
    """How calls of tools are read from the model's text, such as `hermes`. Default: tools are not called."""
    reasoning_parser: Annotated[Word, PUBLIC] | None = None
    """How thinking is told from the answer, such as `qwen3`."""
    adapters: Annotated[tuple[VllmAdapter, ...], MaxLen(MAX_ADAPTERS)] = ()
    """Adapters (LoRA) of this model, each a model of its own with a name of its own. They share its process, slots and
    memory, and are loaded and unloaded with it. `lora_path` instead answers every request with one adapter."""

    @property
    @override
    def served_adapters(self) -> tuple[AdapterSettings, ...]:
        return self.adapters
