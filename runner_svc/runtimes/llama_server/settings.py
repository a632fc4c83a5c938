"""The settings of a model of llama.cpp's server in `weft.yaml`."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, Self

from annotated_types import Ge, Gt, Le, MaxLen
from typing_extensions import override

from runner_svc.runtimes.settings import MAX_ADAPTERS, AdapterSettings, FileModelSettings
from weft.kernel.settings import PUBLIC, PathText

SpeculationKind = Literal[
    "none", "draft-simple", "draft-mtp", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaAdapter(AdapterSettings):
    """An adapter of a model of llama.cpp's server: a model of its own, which shares the engine of that model."""

    path: Annotated[PathText, PUBLIC]
    """The GGUF file of the adapter, as `convert_lora_to_gguf.py` makes it; `~` is your home folder."""
    scale: Annotated[float, Gt(0), Le(100)] = 1.0
    """How strongly it changes the model."""

    @property
    def file(self) -> Path:
        """The file, by its whole path."""
        return self.path.expanduser()

    @property
    @override
    def digested_file(self) -> Path | None:
        return self.file


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaServerModel(FileModelSettings):
    """A model that llama.cpp's server serves from a GGUF file.

    It offers `rerank` alone with `--reranking` among its `extra_arguments`.
    """

    mmproj_path: Annotated[PathText, PUBLIC] | None = None
    """The projector (GGUF) with which it takes images or audio: what of both, its header tells."""
    draft_model_path: Annotated[PathText, PUBLIC] | None = None
    """A smaller model (GGUF) with the same vocabulary, which drafts tokens that this one checks many at a time."""
    spec_type: Annotated[SpeculationKind, PUBLIC] | None = None
    """Speculative decoding: `draft-simple` with `draft_model_path`, `draft-mtp` with a model that was made for it, the
    others by repetitions of the text. Default: `draft-simple` where there is a draft model, else the server's."""
    spec_draft_n_max: Annotated[int, Ge(1), Le(6)] | None = None
    """Tokens that are guessed at a time. Default: the server's."""
    spec_draft_p_min: Annotated[float, Ge(0), Le(1)] | None = None
    """How probable a guess must be for guessing to go on. Default: the server's."""
    spec_draft_ngl: Annotated[int, Ge(0), Le(999)] | None = None
    """Layers of the draft model on accelerators; 0: none. Default: as many as fit."""
    image_max_tokens: Annotated[int, Ge(1), Le(65_536)] | None = None
    """Tokens that one image may take; for vision models. Default: the server's."""

    kept_prompts_mb: Annotated[int, Ge(0), Le(1_048_576)] = 1024
    """Memory of the host in MiB for prompts that no slot holds any more, so that a conversation that comes again is not
    computed again; 0: none. At most an eighth of the machine's memory and half of the free memory of `/dev/shm`."""

    adapters: Annotated[tuple[LlamaAdapter, ...], MaxLen(MAX_ADAPTERS)] = ()
    """Adapters (LoRA) of this model, each a model of its own with a name of its own. They share its process, slots and
    memory, and are loaded and unloaded with it."""

    @property
    @override
    def served_adapters(self) -> tuple[AdapterSettings, ...]:
        return self.adapters

    @property
    @override
    def projector_file(self) -> Path | None:
        return None if self.mmproj_path is None else self.mmproj_path.expanduser()

    @override
    def pulled(self, path: Path, projector: Path | None) -> Self:
        own = {"--mmproj", "-mm", "--mmproj-url", "-mmu", "--no-mmproj"}
        takes = projector is not None and self.mmproj_path is None and own.isdisjoint(self.extra_arguments)
        # Not by super(): a dataclass with slots is another class than the one that methods close over.
        pulled = FileModelSettings.pulled(self, path, projector)
        return replace(pulled, mmproj_path=projector) if takes else pulled

    @property
    @override
    def draft_file(self) -> Path | None:
        return None if self.draft_model_path is None else self.draft_model_path.expanduser()
