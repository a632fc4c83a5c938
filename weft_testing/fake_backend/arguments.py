"""The command line: flags of llama-server and vLLM, and one per switch of Behaviour; other flags are ignored."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path, PurePath
from typing import Any

import msgspec

from weft_testing.fake_backend.behaviour import Behaviour, updated
from weft_testing.fake_backend.dialect import LLAMA_SERVER, Dialect

DEFAULT_CONTEXT_TOKENS = 8192
DEFAULT_SLOTS = 4
MAX_SLOTS = 1024
MAX_CONTEXT_TOKENS = 16 * 1024 * 1024
SERVE = "serve"
"""vLLM's subcommand, which precedes the model."""
VLLM_KEY_VARIABLE = "VLLM_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings that are fixed for the process's life."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: any free port, reported on stdout."""
    alias: str = "fake"
    api_key: str = ""
    """Empty: no key is required."""
    slots: int = DEFAULT_SLOTS
    context_tokens: int = DEFAULT_CONTEXT_TOKENS
    """Shared by all slots."""
    model_path: str = "fake.gguf"
    embeddings: bool = False
    reranking: bool = False
    offers: frozenset[str] = frozenset()
    """Supported operations: `image`, `transcription`, `speech`."""
    dialect: Dialect = LLAMA_SERVER
    text_only: bool = False
    """Whether it simulates a server without a projector whose template supports neither tools nor thinking."""
    speaks_vllm: bool = False
    """Whether /tokenize has vLLM's format."""
    is_vllm: bool = False
    """Whether it was started as `serve MODEL`: it has a vLLM's routes, and requires its key only below /v1."""
    request_metrics: bool = False
    """Whether a vLLM reports the times of each request."""
    reuse_port: bool = False
    """Whether other processes of this user may listen on its port too, as with some servers."""
    uds: str = ""
    """Unix socket to listen on instead of a port."""
    sleep_mode: bool = False
    slot_save_path: str = ""
    """Empty: slots can be neither saved nor erased."""
    die_with_parent: bool = False
    take_device_memory: int = 0
    """Bytes of fake cards (see `fake_nvml`); 0: none."""
    tensor_split: tuple[float, ...] = ()
    """Share of that memory per card; empty: equal."""
    request_log: Path | None = None
    """File to which every request is logged (see `state.RequestLog`); None: no log."""

    @property
    def slot_context_tokens(self) -> int:
        """Context of one slot, for prompt and answer."""
        return max(1, self.context_tokens // self.slots)


def parse_command_line(arguments: Sequence[str]) -> tuple[ServerSettings, Behaviour]:
    """Returns settings and behavior; prints to stderr and exits with 2 if a value is out of range."""
    parser = _parser()
    values, unknown = parser.parse_known_args(arguments)
    if unknown and SERVE not in unknown:
        print(f"warning: ignored unknown arguments: {' '.join(unknown)}", file=sys.stderr, flush=True)  # noqa: T201
    try:
        behaviour = updated(Behaviour(), _switches(values), strict=False)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        parser.error(str(error))
    return _settings(values, is_vllm=SERVE in unknown), behaviour


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="weft_testing.fake_backend", allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=_between(0, 65_535), default=0)
    parser.add_argument("--alias", "-a", "--served-model-name", default="")
    parser.add_argument("--reuse-port", action="store_true")
    parser.add_argument("--uds", default="")
    parser.add_argument("--enable-sleep-mode", dest="sleep_mode", action="store_true")
    parser.add_argument("--enable-per-request-metrics", dest="request_metrics", action="store_true")
    # Like llama-server: arguments are visible to every user of the machine, the environment is not.
    parser.add_argument("--api-key", default=None)
    parser.add_argument("--key-variable", default="LLAMA_API_KEY", help="environment variable of the key")
    slots, context = _between(1, MAX_SLOTS), _between(0, MAX_CONTEXT_TOKENS)
    parser.add_argument("--parallel", "-np", "--max-num-seqs", dest="slots", type=slots, default=DEFAULT_SLOTS)
    parser.add_argument("--ctx-size", "-c", dest="context_tokens", type=context, default=DEFAULT_CONTEXT_TOKENS)
    parser.add_argument("--max-model-len", type=_between(1, MAX_CONTEXT_TOKENS), default=0, help="per slot")
    parser.add_argument("--model", "-m", dest="model_path", default="fake.gguf", help="not read")
    parser.add_argument("--mmproj", "-mm", default="", help="not read")
    parser.add_argument("--model-draft", "-md", default="", help="not read")
    parser.add_argument("--threads", "-t", type=int, default=1, help="not used")
    parser.add_argument("--embeddings", "--embedding", action="store_true")
    parser.add_argument("--reranking", "--rerank", action="store_true")
    parser.add_argument("--offers", type=_words, default=frozenset(), help="image,transcription,speech")
    parser.add_argument("--dialect", type=_dialect, default=LLAMA_SERVER, help="a Dialect as JSON")
    parser.add_argument("--listen-variable", default="", help="environment variable of the address, as HOST:PORT")
    parser.add_argument("--text-only", action="store_true", help="no projector, no tools, no thinking")
    parser.add_argument("--speaks-vllm", action="store_true", help="/tokenize as vLLM has it")
    parser.add_argument("--slot-save-path", default="", help="folder for saved slots; needed to erase one, too")
    parser.add_argument("--die-with-parent", action="store_true", help="SIGKILL when the starting thread ends")
    parser.add_argument("--take-device-memory", type=int, default=0, help="bytes of weft_testing.fake_nvml's cards")
    parser.add_argument("--tensor-split", "-ts", type=_proportions, default=(), help="of that memory")
    parser.add_argument("--request-log", type=Path, default=None, help="file to append a line per request to")
    for field in msgspec.structs.fields(Behaviour):
        flag = "--" + field.name.replace("_", "-")
        if field.type is bool:
            parser.add_argument(flag, dest=field.name, action="store_true", default=None)
        else:
            parser.add_argument(flag, dest=field.name, default=None)
    return parser


def _settings(values: argparse.Namespace, *, is_vllm: bool) -> ServerSettings:
    host, _, port = os.environ.get(values.listen_variable, "").rpartition(":")
    key_variable = VLLM_KEY_VARIABLE if is_vllm else values.key_variable
    given = {field.name: getattr(values, field.name) for field in fields(ServerSettings) if field.name in values}
    computed = {
        "host": host or values.host,
        "port": int(port or values.port),
        "alias": values.alias or PurePath(values.model_path).name,
        "api_key": os.environ.get(key_variable, "") if values.api_key is None else values.api_key,
        "context_tokens": values.max_model_len * values.slots or values.context_tokens or DEFAULT_CONTEXT_TOKENS,
        "speaks_vllm": values.speaks_vllm or is_vllm,
        "is_vllm": is_vllm,
    }
    return ServerSettings(**{**given, **computed})


def _switches(values: argparse.Namespace) -> dict[str, Any]:
    switches = {field.name: getattr(values, field.name) for field in msgspec.structs.fields(Behaviour)}
    for name in ("tool_call", "turns"):
        if switches[name] is not None:
            switches[name] = msgspec.json.decode(switches[name])
    return {name: value for name, value in switches.items() if value is not None}


def _dialect(text: str) -> Dialect:
    try:
        return msgspec.json.decode(text, type=Dialect)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split(","))


def _proportions(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.replace("/", ",").split(","))


def _between(low: int, high: int) -> Callable[[str], int]:
    """Returns a parser of an integer within limits, for argparse."""

    def integer(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be between {low} and {high}")
        return value

    return integer
