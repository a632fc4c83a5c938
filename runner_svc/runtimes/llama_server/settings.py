"""The settings of a model of llama.cpp's server in `weft.yaml`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typing_extensions import override

from runner_svc.runtimes.settings import FileModelSettings
from weft.kernel.settings import PUBLIC, PathText


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaServerModel(FileModelSettings):
    """A model that llama.cpp's server serves from a GGUF file.

    It offers `rerank` alone with `--reranking` among its `extra_arguments`.
    """

    mmproj_path: Annotated[PathText, PUBLIC] | None = None
    """The projector (GGUF) with which it takes images or audio: what of both, its header tells."""
    draft_model_path: Annotated[PathText, PUBLIC] | None = None
    """A smaller model (GGUF) with the same vocabulary, which drafts tokens that this one checks many at a time."""

    @property
    @override
    def projector_file(self) -> Path | None:
        return None if self.mmproj_path is None else self.mmproj_path.expanduser()

    @property
    @override
    def draft_file(self) -> Path | None:
        return None if self.draft_model_path is None else self.draft_model_path.expanduser()
