"""The settings of a model of llama.cpp's server in `weft.yaml`."""

from dataclasses import dataclass

from runner_svc.runtimes.settings import FileModelSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaServerModel(FileModelSettings):
    """A model that llama.cpp's server serves from a GGUF file.

    It offers `rerank` alone with `--reranking` among its `extra_arguments`, and takes images with `--mmproj`.
    """
