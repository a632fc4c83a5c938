"""A simulated installation of another package's runtime with a separate engine environment.

The environment contains one package, the wheel `pebble` created here.
"""

import hashlib
import zipfile
from base64 import urlsafe_b64encode
from pathlib import Path

from kit.runtime_plugin import install_runtime

NAME = "gravel"
WHEEL = "pebble-1.0-py3-none-any.whl"
CONFIGURATION = "runners: [{name: box, runtime: gravel, models: [{name: stone}]}]"

_RUNTIME = """
from pathlib import Path

from runner_svc.environments.environment import EngineEnvironment, EnvironmentVariant, Variant
from runner_svc.runtimes.openai_http.runtime import PARAMETERS
from runner_svc.runtimes.runtime import Runtime
from runner_svc.runtimes.runtime_settings import StartedModelSettings

ENVIRONMENT = EngineEnvironment(
    folder=Path(__file__).parent / "gravel",
    summary="Gravel 1.0",
    variants={
        variant: EnvironmentVariant(
            locks=("cpu.lock",), installed_bytes=1_000_000, download_bytes=1, stubs=("grit==2.0+cpu",) * is_cpu
        )
        for variant, is_cpu in ((Variant.CPU, True), (Variant.CUDA, False))
    },
    check="import pebble",
    oldest_python=(3, 11),
    newest_python=(3, 14),
)


def build(model, context):
    raise context.refuse("name", context.environments.environment_program(ENVIRONMENT, "pebble"))


RUNTIME = Runtime(
    name="gravel",
    summary="gravel",
    docs="https://example.com",
    settings=StartedModelSettings,
    build=build,
    parameters=PARAMETERS,
    environment=ENVIRONMENT,
)
"""


def install_gravel(site: Path, lock: str = "") -> Path:
    """Installs the runtime in `site`, a folder of Python packages; returns its lock file."""
    package = site / "weft_gravel"
    (package / NAME).mkdir(parents=True)
    (package / "runtime.py").write_text(_RUNTIME, "utf-8")
    (package / "__init__.py").touch()
    install_runtime(site, "weft-gravel", NAME, "weft_gravel.runtime:RUNTIME")
    path = package / NAME / "cpu.lock"
    path.write_text(lock, "utf-8")
    return path


def lock_of(wheel: Path) -> str:
    name, version = wheel.name.split("-")[:2]
    return f"{name}=={version} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"


def write_wheel(folder: Path, *, filling_bytes: int = 0) -> Path:
    """Writes the wheel of `pebble` with a program of that name; `filling_bytes` makes it larger."""
    folder.mkdir(parents=True, exist_ok=True)
    info = "pebble-1.0.dist-info"
    files = {
        "pebble/__init__.py": b"def main():\n    print('a pebble')\n",
        "pebble/filling": bytes(filling_bytes),
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: pebble\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: weft\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": b"[console_scripts]\npebble = pebble:main\n",
    }
    record = "".join(f"{name},sha256={_digest(content)},{len(content)}\n" for name, content in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    path = folder / WHEEL
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
    return path


def _digest(content: bytes) -> str:
    return urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
