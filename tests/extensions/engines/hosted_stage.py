"""What the tests of backends over libraries share: stand-ins for libraries, their faults, and requests."""

import json
import os
from pathlib import Path
from typing import Any

from runner_svc.policy.timeouts import StopGraces
from weft_testing.conformance.backend import Engine
from weft_testing.conformance.backend_steps import MAX_LOG_BYTES

LIBRARY = Path(__file__).with_name("scripted_library")
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
SWITCHES: dict[Engine, dict[str, Any]] = {
    Engine.NORMAL: {},
    Engine.SLOW: {"endless": True, "seconds_per_token": 0.05},
    Engine.NEVER_READY: {"never_ready": True},
    Engine.EXITS_AT_START: {"exit_at_start": 3},
    Engine.IGNORES_SIGTERM: {"ignore_sigterm": True},
    Engine.NOISY: {"stderr_flood_bytes": MAX_LOG_BYTES},
    Engine.WITH_DESCENDANT: {"fork_grandchild": True},
}
_STALLS = {"never_ready", "load_step_seconds"}


def scripted(variable: str, switches: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """The settings of a backend over a stand-in, whose switches are in this environment variable."""
    return {
        "environment": {**os.environ, "PYTHONPATH": str(LIBRARY), variable: json.dumps(switches or {})},
        # Short only where it is what the test is about: a busy machine may not move a process for a second.
        "load_stall_seconds": 1.0 if _STALLS & set(switches or {}) else 30.0,
        "graces": StopGraces(first_term_seconds=0.3, second_term_seconds=0.3),
        **settings,
    }


def model_folder(folder: Path, weights: str, config: dict[str, Any], **left_out: bool) -> Path:
    """A folder with the files of a model; `left_out` names those that are missing."""
    folder.mkdir()
    files = {
        weights: "weights",
        "config.json": json.dumps(config),
        "tokenizer.json": json.dumps({"decoder": {"type": "ByteLevel"}, "added_tokens": [{"content": "<s>"}]}),
        "tokenizer_config.json": json.dumps({"bos_token": "<s>", "eos_token": "</s>"}),
        "chat_template.jinja": TEMPLATE,
    }
    for name, text in files.items():
        if name not in left_out:
            (folder / name).write_text(text)
    return folder
