"""The host program of vLLM.

PYTHON .../runner_svc/engine_host/bootstrap.py runner_svc.runtimes.vllm.host --socket PATH -- FLAGS OF VLLM
"""

import argparse
import sys
from typing import Any

from runner_svc.engine_host.engine import Send, import_library
from runner_svc.engine_host.host import serve
from runner_svc.runtimes.vllm.engine import EngineOptions, Libraries, VllmEngine

SEPARATOR = "--"


def parse_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parses the flags of this program; returns them and those of vLLM, which follow the separator."""
    place = argv.index(SEPARATOR) if SEPARATOR in argv else len(argv)
    parser = argparse.ArgumentParser(prog="vllm_host", description=__doc__)
    parser.add_argument("--socket", required=True, help="Unix socket on which the runner listens")
    parser.add_argument(
        "--adapter", action="append", default=[], help="NAME=PATH of a LoRA; without name: of every request"
    )
    parser.add_argument("--sleep-level", type=int, default=1, help="2: a sleeping engine drops its weights")
    return parser.parse_args(argv[:place]), argv[place + 1 :]


def libraries() -> Libraries:
    """Imports the library. Raises LibraryMissingError."""
    return Libraries(
        arguments=import_library("vllm.engine.arg_utils"),
        parser=import_library("vllm.utils.argparse_utils"),
        engine=import_library("vllm.v1.engine.async_llm"),
        sampling=import_library("vllm.sampling_params"),
        pooling=import_library("vllm.pooling_params"),
        lora=import_library("vllm.lora.request"),
        exceptions=import_library("vllm.exceptions"),
        engine_exceptions=import_library("vllm.v1.engine.exceptions"),
        metrics=import_library("prometheus_client"),
    )


def load(options: argparse.Namespace, engine_flags: list[str], send: Send) -> VllmEngine:
    """Loads the model. Raises LibraryMissingError, RefusedError."""
    found = libraries()
    parser = found.arguments.AsyncEngineArgs.add_cli_args(found.parser.FlexibleArgumentParser(prog="vllm"))
    given: Any = found.arguments.AsyncEngineArgs.from_cli_args(parser.parse_args(engine_flags))
    adapters = dict(adapter.split("=", 1) for adapter in options.adapter)
    return VllmEngine(found, given, EngineOptions(adapters=adapters, sleep_level=options.sleep_level), send)


def main() -> None:
    """Load the model, then work on requests."""
    options, engine_flags = parse_arguments(sys.argv[1:])
    serve(options.socket, lambda send: load(options, engine_flags, send))


if __name__ == "__main__":
    main()
