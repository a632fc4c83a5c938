"""Which llama.cpp a runner of llama_server uses, and whether this machine could use a faster one."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

from runner_svc.environments.environment import Variant
from runner_svc.environments.folder import EnvironmentFolder
from runner_svc.environments.installed_environments import read_receipt, variant_of
from runner_svc.runtimes.llama_server.runtime import ENVIRONMENT, LAUNCHER, llama_command

WHEEL = "xllamacpp"


def engine_report(
    configured: tuple[str, ...] | None, environments: EnvironmentFolder, fitting: Iterable[Variant]
) -> tuple[str, str]:
    """Returns the engine with the reason for it, and the advice for a faster one; empty: there is none.

    `fitting` are the variants for this machine's devices, the fastest first. Raises as `llama_command`.
    """
    command = llama_command(configured, environments)
    words = " ".join(command)
    if configured:
        return f"{words}, as configured", ""
    receipt = read_receipt(environments.link(ENVIRONMENT))
    used = None if receipt is None else variant_of(receipt)
    if used is not None:
        return f"llama.cpp for {used.value}, of weft runtime install", ""
    if LAUNCHER not in command:
        return f"{words}, found on PATH", ""
    text = f"llama.cpp of {WHEEL} {_wheel_version()}"
    best = next(iter(fitting), Variant.CPU)
    # The wheel for Apple's processors uses their GPU.
    if best in (Variant.CPU, Variant.METAL):
        return text, ""
    install = environments.install_command(ENVIRONMENT.name)
    return text, f"this machine has a device for {best.value}; {install} --variant {best.value}"


def _wheel_version() -> str:
    try:
        return version(WHEEL)
    except PackageNotFoundError:
        return "?"
