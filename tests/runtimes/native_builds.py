"""What the tests of heavy runtimes run on, built from source on first use into `.venv-runtimes`."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from weft_app.compose.demo import demo_model_path

ROOT = Path(__file__).parents[2]
BUILD_SECONDS = 3600.0
CCACHE = ROOT / ".venv-runtimes" / "ccache"
LLAMA_CPP = ROOT / ".venv-runtimes" / "llama.cpp"
LIBRARY_ENVIRONMENT = ROOT / ".venv-runtimes" / "llama-cpp-python"
VLLM = ROOT / ".venv-runtimes" / "vllm"
CTRANSLATE2 = ROOT / ".venv-runtimes" / "ctranslate2"
FASTER_WHISPER = ROOT / ".venv-runtimes" / "faster-whisper"
CONVERSION_ENVIRONMENT = ROOT / ".venv-runtimes" / "conversion"
DIFFUSERS = ROOT / ".venv-runtimes" / "diffusers"
SPEECH = ROOT / ".venv-runtimes" / "speech"
MINILM = ROOT / ".venv-runtimes" / "minilm"
_CCACHE_SCRIPT = Path(__file__).with_name("build_ccache.sh")
_TOOLCHAIN = Path(__file__).with_name("llama_cpp_toolchain.cmake")
_LIBRARY_SCRIPT = Path(__file__).with_name("build_llama_cpp_python.sh")
_VLLM_SCRIPT = Path(__file__).with_name("build_vllm.sh")
_CTRANSLATE2_SCRIPT = Path(__file__).with_name("build_ctranslate2.sh")
_FASTER_WHISPER_SCRIPT = Path(__file__).with_name("build_faster_whisper.sh")
_DIFFUSERS_SCRIPT = Path(__file__).with_name("build_diffusers.sh")
_PIPELINES_SCRIPT = Path(__file__).with_name("make_tiny_pipelines.py")
_SPEECH_SCRIPT = Path(__file__).with_name("build_speech.sh")
_CONVERSION_SCRIPT = Path(__file__).with_name("build_conversion.sh")
_MINILM_SCRIPT = Path(__file__).with_name("build_minilm.sh")
_MLX_LM_SCRIPT = Path(__file__).with_name("build_mlx_lm.sh")
_UNPACKING = (_CONVERSION_SCRIPT, Path(__file__).with_name("unpack_smollm2.py"))
_ENVIRONMENTS = ROOT / "runner_svc" / "environments"
_ENGINES = ROOT / "weft_extensions" / "engines" / "environments"
_LLAMA_LOCKS = tuple(_ENVIRONMENTS / "llama_server" / f"{name}.lock" for name in ("source", "tools"))
SERVER_SCRIPTS = (
    *(_TOOLCHAIN, _TOOLCHAIN.with_name("llama_cpp_targets.cmake"), *_LLAMA_LOCKS),
    Path(__file__).with_name("build_llama_server.sh"),
)
_CTRANSLATE2_LOCK = _ENGINES / "ctranslate2" / "cpu.lock"
_FASTER_WHISPER_LOCK = _ENGINES / "faster_whisper" / "cpu.lock"
_DIFFUSERS_LOCKS = (_ENGINES / "diffusers" / "cpu-torch.lock", _ENGINES / "diffusers" / "cpu.lock")
_SPEECH_LOCK = _ENGINES / "speech" / "cpu.lock"
_VLLM_LOCKS = (_ENVIRONMENTS / "vllm" / "cpu-torch.lock", _ENVIRONMENTS / "vllm" / "cpu.lock")
WEFT = Path(sys.executable).with_name("weft")
MLX_LM = ROOT / ".venv-runtimes" / "mlx-lm"
RECIPE = "recipe"
"""File in a build: the digest of the scripts that made it. A build of other flags or versions is not used."""


def built_ctranslate2() -> tuple[Path, Path]:
    """The interpreter of CTranslate2's environment, as `weft runtime install` makes it, and the demo model for it."""
    conversion = built_conversion()
    scripts = (*_UNPACKING, _CTRANSLATE2_LOCK, _CTRANSLATE2_SCRIPT)
    _ensure_installed(CTRANSLATE2, scripts, WEFT, conversion, demo_model_path(), CTRANSLATE2)
    return CTRANSLATE2 / "runtimes" / "ctranslate2" / "bin" / "python", CTRANSLATE2 / "smollm2"


def built_faster_whisper() -> tuple[Path, Path]:
    """The interpreter of faster-whisper's environment, and a Whisper model that hears English (a minute, 0.5 GB)."""
    _ensure_installed(FASTER_WHISPER, (_FASTER_WHISPER_LOCK, _FASTER_WHISPER_SCRIPT), WEFT, FASTER_WHISPER)
    return FASTER_WHISPER / "runtimes" / "faster_whisper" / "bin" / "python", FASTER_WHISPER / "tiny.en"


def built_speech() -> tuple[Path, Path]:
    """The interpreter of the environment of speech, and a folder with a voice of piper (a minute, 0.4 GB)."""
    _ensure_installed(SPEECH, (_SPEECH_LOCK, _SPEECH_SCRIPT), WEFT, SPEECH)
    return SPEECH / "runtimes" / "speech" / "bin" / "python", SPEECH / "voices"


def built_mlx_lm() -> tuple[Path, Path]:
    """The program mlx_lm.server of an environment with MLX on processors, and the demo model for it."""
    _ensure_installed(MLX_LM, (*_UNPACKING, _MLX_LM_SCRIPT), built_conversion(), demo_model_path(), MLX_LM)
    return MLX_LM / "bin" / "mlx_lm.server", MLX_LM / "smollm2"


def built_vllm() -> tuple[Path, Path]:
    """The program `vllm` as `weft runtime install` installs it, and the demo model for it (five minutes, 3.1 GB)."""
    conversion = built_conversion()
    scripts = (*_UNPACKING, *_VLLM_LOCKS, _VLLM_SCRIPT)
    _ensure_installed(VLLM, scripts, WEFT, conversion, demo_model_path(), VLLM)
    return VLLM / "runtimes" / "vllm" / "bin" / "vllm", VLLM / "smollm2"


def built_diffusers() -> tuple[Path, Path]:
    """The interpreter of diffusers' environment, and a folder of pipelines of every family (a minute, 1.1 GB)."""
    scripts = (_PIPELINES_SCRIPT, *_DIFFUSERS_LOCKS, _DIFFUSERS_SCRIPT)
    _ensure_installed(DIFFUSERS, scripts, WEFT, DIFFUSERS)
    return DIFFUSERS / "runtimes" / "diffusers" / "bin" / "python", DIFFUSERS / "pipelines"


def llama_cpp_variables() -> dict[str, str]:
    """The environment of a build of llama.cpp, in which a second one takes from a cache what the first has compiled.

    llama.cpp uses ccache where it finds one. Of two builds, the kernels alone differ, as they are for other processors.
    """
    _ensure_installed(CCACHE, (_CCACHE_SCRIPT,), CCACHE)
    return {
        "PATH": f"{CCACHE / 'bin'}:{os.environ['PATH']}",
        "CCACHE_DIR": str(CCACHE / "cache"),
        "CCACHE_BASEDIR": str(CCACHE.parent),
        "CMAKE_TOOLCHAIN_FILE": str(_TOOLCHAIN),
    }


def built_llama_server() -> Path:
    """The native llama-server, with libllama.so beside it (six minutes on two cores, or one)."""
    if not is_built_by(LLAMA_CPP, *SERVER_SCRIPTS):
        if shutil.which("c++") is None:
            pytest.skip("there is no C++ compiler on this machine; llama.cpp cannot be built")
        _ensure_installed(LLAMA_CPP, SERVER_SCRIPTS, LLAMA_CPP, **llama_cpp_variables())
    return LLAMA_CPP / "bin" / "llama-server"


def built_llama_cpp_python() -> Path:
    """The interpreter of an environment that has llama-cpp-python, over the same library (seconds more)."""
    built_llama_server()
    _ensure_installed(LIBRARY_ENVIRONMENT, (*SERVER_SCRIPTS, _LIBRARY_SCRIPT), LLAMA_CPP, LIBRARY_ENVIRONMENT)
    return LIBRARY_ENVIRONMENT / "bin" / "python"


def built_conversion() -> Path:
    """The environment that converts weights, with transformers, torch and llama.cpp's converter (a minute, 1.3 GB)."""
    _ensure_installed(CONVERSION_ENVIRONMENT, (_CONVERSION_SCRIPT,), CONVERSION_ENVIRONMENT)
    return CONVERSION_ENVIRONMENT


def built_minilm() -> Path:
    """all-MiniLM-L6-v2 as a GGUF file of 46 MB (20 seconds more)."""
    _ensure_installed(MINILM, (_CONVERSION_SCRIPT, _MINILM_SCRIPT), built_conversion(), MINILM)
    return MINILM / "minilm.gguf"


def is_built_by(folder: Path, *scripts: Path) -> bool:
    """Whether the build in `folder` is complete and comes from these scripts as they are now, flags and versions."""
    try:
        return (folder / RECIPE).read_text() == recipe_of(*scripts)
    except FileNotFoundError:
        return False


def recipe_of(*scripts: Path) -> str:
    """The digest of these scripts."""
    return hashlib.sha256(b"\0".join(script.read_bytes() for script in scripts)).hexdigest()


def _ensure_installed(folder: Path, scripts: tuple[Path, ...], *arguments: Path, **variables: str) -> None:
    """Runs the last of the scripts with these arguments and variables, unless `folder` has what all of them make.

    Workers that need the same build wait for the one that makes it.
    """
    folder.parent.mkdir(exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_built_by(folder, *scripts):
            return
        (folder / RECIPE).unlink(missing_ok=True)  # a build that is broken off is none
        command = ["bash", str(scripts[-1]), *map(str, arguments)]
        subprocess.run(command, check=True, timeout=BUILD_SECONDS, env={**os.environ, **variables})
        (folder / RECIPE).write_text(recipe_of(*scripts))
