"""`weft keys sign`: tokens of a shared key that permit one operation, once, for a few minutes."""

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from weft.api.operations.v1 import operation_pb2
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.machine.file_replacement import replace_file
from weft.kernel.values.names import require_name
from weft.signing.strict_json import MAX_TOKEN_BYTES
from weft.signing.tokens import MAX_SIGNERS, make_op_token, read_shared_key
from weft_app.cli import verbs
from weft_app.cli.terminal import say

app = typer.Typer()


def _make_token(
    action: operation_pb2.OperationAction,
    *,
    shared_key: Annotated[Path, typer.Option("--shared-key", metavar="FILE", help="The key shared with the registry.")],
    signers: Annotated[
        list[str], typer.Option("--signer", metavar="ID", help="Name of a signer who agrees (repeatable).")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Output file of the token. Default: standard output.")
    ] = None,
) -> None:
    named = tuple(dict.fromkeys(signers))
    if len(named) > MAX_SIGNERS:
        raise invalid_field("--signer", f"must name 1 to {MAX_SIGNERS} signers")
    for signer in named:
        require_name(signer, "--signer")
    key = read_shared_key(shared_key, "--shared-key")
    token = make_op_token(action, signers=named, issued_at=int(time.time()), key=key)
    _hand_over(json.dumps(token, indent=2, ensure_ascii=True) + "\n", out)


_PERMITS = (
    (
        verbs.load,
        "Permit a load with exactly these options. Then run `weft load` with the same options and the token.",
        "load qwen --ctx 8192",
    ),
    (verbs.unload, "Permit an unload.", "unload qwen"),
    (verbs.pull, "Permit a pull to the home of a runner.", "pull hf:Qwen/Qwen3-8B-GGUF:Q4_K_M --runner gpu-0"),
    (verbs.remove, "Permit the removal of a model that was loaded from a source.", "remove qwen3-8b-q4_k_m"),
    (verbs.flush, "Permit dropping cached prefixes.", "flush --tenant acme"),
)
for _verb, _text, _example in _PERMITS:
    _help = f"{_text}\n\nExample: weft keys sign {_example} --shared-key model-api.key --signer alice --out op.json"
    app.command(_verb.__name__)(verbs.command(_verb, _make_token, _help))


def _hand_over(text: str, out: Path | None) -> None:
    """Prints a token, or replaces the file atomically by it. Raises INVALID_ARGUMENT naming --out."""
    if out is None:
        say(text)
        return
    if len(text) > MAX_TOKEN_BYTES:
        raise invalid_field("--out", f"the token would be larger than {MAX_TOKEN_BYTES // 1024} KiB")
    if not out.parent.is_dir():
        raise invalid_field("--out", f"{out} cannot be written: there is no folder {out.parent}")
    try:
        replace_file(out, text.encode())
    except OSError as error:
        raise invalid_field("--out", f"{out} cannot be written: {error.strerror}") from error
