"""The settings of a model of llama-cpp-python in `weft.yaml`."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from runner_svc.runtimes.settings import FileModelSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaCppPythonModel(FileModelSettings):
    """A model that llama-cpp-python serves from a GGUF file."""

    slots: Annotated[int, Ge(1), Le(1024)] = 1
    """Always 1: the library works on one request at a time."""
    extra_arguments: tuple[str, ...] = ()
    """Further flags for the server program, such as `--gpu-layers 0`."""
