"""Checks of the adapters of a model before it is served: their files, and what they cannot be combined with."""

from runner_svc.model_files.gguf import read_gguf_header
from runner_svc.runtimes.llama_server.arguments import ADAPTER_FLAGS, names_flag, reranks, shares_between_slots
from runner_svc.runtimes.llama_server.settings import LlamaAdapter, LlamaServerModel
from runner_svc.runtimes.model_engine import ModelContext
from weft.kernel.errors import WeftError

_SEPARATORS = (":", ",")
"""Characters that separate files and scales in the server's flag."""


def check_adapters(model: LlamaServerModel, context: ModelContext) -> None:
    """Raise INVALID_ARGUMENT naming the setting for adapters that the server could not load, or not keep apart."""
    if not model.adapters:
        return
    if reranks(model):
        raise context.refuse("adapters", "are for models that generate, and this one only ranks")
    if names_flag(model.extra_arguments, ADAPTER_FLAGS):
        raise context.refuse("adapters", f"cannot be combined with {ADAPTER_FLAGS[0]} among extra_arguments")
    if shares_between_slots(model.extra_arguments):
        # It finds prompts again whatever adapter they were computed with.
        raise context.refuse("adapters", "cannot be combined with --cache-ram, which mixes up their cached prompts")
    architecture = _architecture_of(model)
    for index, adapter in enumerate(model.adapters):
        if (fault := _fault(adapter, architecture)) is not None:
            raise context.refuse(f"adapters[{index}].path", fault)


def _architecture_of(model: LlamaServerModel) -> str:
    """Returns the architecture of the model by its file; empty: unknown."""
    try:
        return read_gguf_header(model.file).architecture
    except (WeftError, OSError):
        return ""


def _fault(adapter: LlamaAdapter, architecture: str) -> str | None:
    """Returns why the server cannot load an adapter for a model of this architecture; None: nothing is known."""
    file = adapter.file
    if not file.is_file():
        return f"there is no file {file}"
    if any(separator in str(file) for separator in _SEPARATORS):
        return f"must have neither {' nor '.join(map(repr, _SEPARATORS))} in it: {file}"
    try:
        header = read_gguf_header(file)
    except (WeftError, OSError) as error:
        return f"cannot be read as an adapter: {getattr(error, 'message', error)}"
    if (header.kind, header.adapter_kind) != ("adapter", "lora"):
        return f"is no adapter (LoRA) but {header.kind or 'a GGUF file of another kind'}: {file}"
    if architecture and header.architecture != architecture:
        return f"is for models of the architecture {header.architecture}, and this one is {architecture}"
    return None
