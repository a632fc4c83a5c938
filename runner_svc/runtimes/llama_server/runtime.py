"""The runtime llama_server: llama.cpp's HTTP server, one process per model, started and ended by weft."""

import platform
import shutil
import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Self

from annotated_types import Gt, Le, MaxLen
from typing_extensions import override

from runner_svc.environments import cuda_toolkit
from runner_svc.environments.environment import (
    FOLDER,
    BuildTool,
    EngineEnvironment,
    EnvironmentVariant,
    HeaderPackage,
    SourceBuild,
    ToolPackages,
    Variant,
)
from runner_svc.environments.folder import EnvironmentFolder
from runner_svc.policy.engine_choice import WeightFormat
from runner_svc.policy.engine_variables import DEVICE_VARIABLES
from runner_svc.policy.memory_estimate import EngineHabits
from runner_svc.policy.parameters import (
    LOOK_BACK,
    MAX_INT,
    MAX_TEMPLATE_ARGUMENT_CHARS,
    MIROSTAT,
    TEMPLATE_ARGUMENTS,
    Document,
    EngineParameters,
    Flag,
    Grammar,
    Number,
    Schema,
    Texts,
)
from runner_svc.policy.tuning import TunedParameter
from runner_svc.runtimes.runtime import Requirement, Runtime, deferred
from runner_svc.runtimes.runtime_settings import MAX_ADAPTERS, AdapterSettings, GgufModelSettings
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.settings.setting_annotations import PUBLIC, PathText

PARAMETERS = EngineParameters(
    engine="llama.cpp's server",
    # Names and meanings are from the request schema of llama.cpp's tools/server; missing bounds are weft's.
    allowed={
        "adaptive_decay": Number(0, 0.99),
        "adaptive_target": Number(-1, 1),
        TEMPLATE_ARGUMENTS: Document(MAX_TEMPLATE_ARGUMENT_CHARS),
        "dry_allowed_length": Number(0, 1024, whole=True),
        "dry_base": Number(1, 100),
        "dry_multiplier": Number(0, 100),
        "dry_penalty_last_n": LOOK_BACK,
        "dry_sequence_breakers": Texts(32, 64),
        "dynatemp_exponent": Number(0, 10),
        "dynatemp_range": Number(0, 5),
        "grammar": Grammar(),
        "ignore_eos": Flag(),
        "json_schema": Schema(),
        "min_keep": Number(0, 1024, whole=True),
        "mirostat": Number(0, 2, whole=True),
        **MIROSTAT,
        "n_indent": Number(0, 1024, whole=True),
        "reasoning_budget_tokens": Number(-1, MAX_INT, whole=True),
        "repeat_last_n": LOOK_BACK,
        "samplers": Texts(16, 32),
        "t_max_predict_ms": Number(-1, 86_400_000, whole=True),
        "thinking_budget_tokens": Number(-1, MAX_INT, whole=True),
        "top_n_sigma": Number(-1, 100),
        "typical_p": Number(0, 1),
        "xtc_probability": Number(0, 1),
        "xtc_threshold": Number(0, 1),
    },
    thinks_by_template=True,
    forces_one_tool=True,
    other_sound_name="wav",
    infills=True,
    format_excludes_calls=True,
    makes_gbnf=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaAdapter(AdapterSettings):
    """An adapter of a llama.cpp model: a separate model, which shares that model's engine."""

    path: Annotated[PathText, PUBLIC]
    """The GGUF file of the adapter, as `convert_lora_to_gguf.py` makes it; `~` is your home folder."""
    scale: Annotated[float, Gt(0), Le(100)] = 1.0
    """Strength of the adapter."""

    @property
    def file(self) -> Path:
        """Absolute path of the adapter file."""
        return self.path.expanduser()

    @property
    @override
    def digested_file(self) -> Path | None:
        return self.file


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaServerModel(GgufModelSettings):
    """A model that llama.cpp's server serves from a GGUF file.

    It offers `rerank` alone with `--reranking` among its `extra_arguments`.
    """

    mmproj_path: Annotated[PathText, PUBLIC] | None = None
    """Multimodal projector (GGUF) for image or audio input. The file's header tells which of the two it supports."""
    draft_model_path: Annotated[PathText, PUBLIC] | None = None
    """Draft model (GGUF) with the same vocabulary, for speculative decoding. Options: `extra_arguments` such as
    `[--spec-type, draft-mtp]`."""
    adapters: Annotated[tuple[LlamaAdapter, ...], MaxLen(MAX_ADAPTERS)] = ()
    """LoRA adapters of the model, each a separate model with its own name. They share the process, slots and memory of
    this model, and are loaded and unloaded with it."""

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
        # super() fails here: @dataclass(slots=True) replaces the class that methods refer to.
        pulled = GgufModelSettings.pulled(self, path, projector)
        return replace(pulled, mmproj_path=projector) if takes else pulled

    @property
    @override
    def draft_file(self) -> Path | None:
        return None if self.draft_model_path is None else self.draft_model_path.expanduser()


PROGRAM = "llama-server"
LAUNCHER = "runner_svc.runtimes.llama_server.xllamacpp_launcher"
_NO_AMX = " ".join(f"-mno-amx-{part}" for part in ("tile", "int8", "bf16"))
"""llama.cpp's kernels for AMX end with SIGSEGV at the first decode (version of the source lock, GCC 12)."""
_COMPILER = BuildTool(
    ("c++", "g++", "clang++"), "GCC 11 or later, or Clang; on Debian and Ubuntu: sudo apt install g++"
)


_CUDA_FLAGS = ("-DGGML_CUDA=ON", "-DGGML_CUDA_NCCL=OFF")
"""NCCL is for several cards in one engine, and would be a library of this machine."""
_NVCC = BuildTool(
    ("nvcc",),
    "NVIDIA's CUDA toolkit, with its folder bin on PATH",
    beside="include/cublas_v2.h",
    packages=ToolPackages(
        lock="cuda.lock",
        prepare=cuda_toolkit.prepare,
        libraries=tuple(f"{cuda_toolkit.FOLDER}/lib/lib{name}.so.*" for name in ("cudart", "cublas", "cublasLt")),
    ),
)
_POOL = "https://deb.debian.org/debian/pool/main"
_VULKAN_HEADERS = (
    HeaderPackage(
        url=f"{_POOL}/v/vulkan-loader/libvulkan-dev_1.4.309.0-1_amd64.deb",
        sha256="8d329d465e16168afff58b1bd0dd6db46aac2cc3f56054a481b25a04e90b345a",
    ),
    HeaderPackage(
        url=f"{_POOL}/s/spirv-headers/spirv-headers_1.6.1+1.4.309.0-1_all.deb",
        sha256="dc18db866d63680351c40ac6b6bece34cb52da64a7799ce1cc4f16f6bff4d064",
    ),
)
"""Debian 13's. llama.cpp does not compile with those of Debian 12."""


def _variant(
    *options: str,
    tool: BuildTool | None = None,
    headers: tuple[HeaderPackage, ...] = (),
    library_bytes: int = 0,
    package_bytes: int = 0,
    work_bytes: int = 1_500_000_000,
) -> EnvironmentVariant:
    """Returns a variant; the sizes are of the tool's packages and of what the program needs of them."""
    return EnvironmentVariant(
        locks=("tools.lock",),
        installed_bytes=60_000_000 + library_bytes,
        download_bytes=110_000_000 + package_bytes,
        build=SourceBuild(
            source="source.lock",
            inside="vendor/llama.cpp",
            options=(
                "-DCMAKE_BUILD_TYPE=Release",
                *(f"-D{name}=OFF" for name in ("BUILD_SHARED_LIBS", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES")),
                # The page would be downloaded, and weft calls the server over plain HTTP.
                *(f"-D{name}=OFF" for name in ("LLAMA_BUILD_UI", "LLAMA_USE_PREBUILT_UI", "LLAMA_OPENSSL")),
                *(
                    f"-DCMAKE_{language}_FLAGS={_NO_AMX}"
                    for language in ("C", "CXX")
                    if platform.machine() in ("x86_64", "AMD64")
                ),
                *options,
            ),
            tools=(_COMPILER,) if tool is None else (_COMPILER, tool),
            headers=headers,
            check=FOLDER / "llama_check.py",
            work_bytes=work_bytes,
        ),
    )


ENVIRONMENT = EngineEnvironment(
    folder=FOLDER / "llama_server",
    summary="llama.cpp's server, built for this machine",
    variants={
        Variant.CPU: _variant(),
        Variant.CUDA: _variant(
            *_CUDA_FLAGS,
            tool=_NVCC,
            library_bytes=600_000_000,
            package_bytes=530_000_000,
            work_bytes=3_000_000_000,
        ),
        Variant.VULKAN: _variant(
            "-DGGML_VULKAN=ON",
            tool=BuildTool(("glslc",), "on Debian and Ubuntu: sudo apt install glslc libvulkan-dev"),
            headers=_VULKAN_HEADERS,
        ),
        Variant.ROCM: _variant("-DGGML_HIP=ON", tool=BuildTool(("hipcc",), "AMD's ROCm, with its folder bin on PATH")),
        Variant.METAL: _variant("-DGGML_METAL=ON", "-DGGML_METAL_EMBED_LIBRARY=ON"),
    },
    program=PROGRAM,
    machine="",
)


def llama_command(
    configured: tuple[str, ...] | None,
    environments: EnvironmentFolder = EnvironmentFolder(),  # noqa: B008 - frozen
) -> tuple[str, ...]:
    """Returns the server command: the configured one, the one built here, one on PATH, or the xllamacpp wheel's.

    Raises INVALID_ARGUMENT with the next step if there is none.
    """
    if configured:
        return configured
    if environments.link(ENVIRONMENT).is_symlink():
        return (str(environments.environment_program(ENVIRONMENT, PROGRAM)),)
    native = shutil.which(PROGRAM)
    if native is not None:
        return (native,)
    if find_spec("xllamacpp") is None:
        raise WeftError(
            Reason.INVALID_ARGUMENT,
            f"there is no {PROGRAM} on PATH and xllamacpp is not installed; "
            f"run: {sys.executable} -m pip install xllamacpp",
        )
    return (sys.executable, "-m", LAUNCHER)


def _find(command: tuple[str, ...] | None) -> str:
    return " ".join(llama_command(command))


TUNED_PARAMETERS = (
    TunedParameter(name="threads"),
    TunedParameter(name="flash_attention", values=("on", "off")),
    TunedParameter(name="cache_type_k", values=("f16", "q8_0", "q4_0")),
    TunedParameter(name="cache_type_v", values=("f16", "q8_0", "q4_0")),
    # The server's batches for embeddings are as long as the context.
    TunedParameter(name="batch_tokens", values=(512, 1024, 2048, 4096), unless_embeds=True),
    TunedParameter(name="ubatch_tokens", values=(128, 256, 512, 1024, 2048), unless_embeds=True),
    TunedParameter(name="gpu_layers", values=(-1, 0, 8, 16, 24, 32, 48), needs_accelerator=True),
    TunedParameter(name="spec_draft_n_max", values=(1, 2, 3, 4, 6), needs="spec_type"),
    TunedParameter(name="spec_draft_p_min", values=(0.0, 0.5, 0.75, 0.9), needs="spec_type"),
)
"""Load parameters that `weft models tune` varies; not `slots` and `context_tokens`: it sends one request at a time."""

RUNTIME = Runtime(
    name="llama_server",
    summary="llama.cpp's server, which weft starts",
    docs="docs/engines.md",
    settings=LlamaServerModel,
    build=deferred("runner_svc.runtimes.llama_server.model:build"),
    formats=frozenset({WeightFormat.GGUF}),
    parameters=PARAMETERS,
    variables=(*DEVICE_VARIABLES, "GGML_*", "LLAMA_*"),
    habits=EngineHabits(embeds=True),
    load_values=deferred("runner_svc.runtimes.llama_server.arguments:load_values"),
    tuned_parameters=TUNED_PARAMETERS,
    environment=ENVIRONMENT,
    needs_environment=False,
    engine_report=deferred("runner_svc.runtimes.llama_server.engine_report:engine_report"),
    requirement=Requirement(name="llama.cpp server", find=_find, remedy="pip install xllamacpp"),
    advice={
        "operations": "llama.cpp's server offers what it is started with (reranking: extra_arguments [--reranking])",
        "url": "is for programs that weft starts; for a running server, use a runner with `runtime: openai_http`",
    },
)
