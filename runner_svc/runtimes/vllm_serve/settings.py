"""The settings of a model of `vllm serve` in `weft.yaml`."""

from dataclasses import dataclass
from typing import Annotated

from runner_svc.runtimes.vllm_engine.settings import VllmModel, Word
from weft.kernel.settings import PUBLIC


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
