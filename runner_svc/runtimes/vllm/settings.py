"""The settings in `weft.yaml` of a model of vLLM in a host program of weft's."""

from dataclasses import dataclass
from typing import Annotated, Literal

from runner_svc.runtimes.vllm_engine.settings import VllmModel
from weft.kernel.settings import PUBLIC


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmLibraryModel(VllmModel):
    """A model that vLLM loads in a process of weft's, without a server between them. It is given text alone.

    `context_tokens` is vLLM's `max_model_len`, and `slots` its `max_num_seqs`: set few for one user, since vLLM
    reserves memory for CUDA graphs by their number.
    """

    kind: Annotated[Literal["generation", "embedding"], PUBLIC] = "generation"
    """What it does; a model of one kind does nothing else. Reranking is for `vllm_serve`."""
