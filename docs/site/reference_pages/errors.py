"""The reasons of failures, with their codes and their meaning from the proto."""

import re
from pathlib import Path

from weft.kernel.errors.reasons import Reason, traits
from weft_app.cli.options import EXIT_CODES, EXIT_FAILED

PROTO = Path(__file__).parents[3] / "protos" / "weft" / "api" / "common" / "v1" / "error_reason.proto"
_VALUE = re.compile(r"(?P<comment>(?:^ *//.*\n)+)^ *ERROR_REASON_(?P<name>[A-Z_]+) = \d+;", re.MULTILINE)
_HEAD = """# Errors

The reason is `code` in an HTTP error, in small letters, and `reason` of `google.rpc.ErrorInfo` over gRPC. [The HTTP
API](../api.md#errors) shows an error. *Retry* says whether the same call may succeed later; *safe* whether
nothing was generated, so that a retry repeats no work. The last column is the exit code of `weft` commands.
"""


def page() -> str:
    """Returns the page."""
    meanings = {
        found["name"]: " ".join(re.sub(r"^ *// ?", "", found["comment"], flags=re.MULTILINE).split())
        for found in _VALUE.finditer(PROTO.read_text("utf-8"))
    }
    rows = ["| reason | meaning | HTTP | gRPC | retry | safe | exit |", "|---|---|---|---|---|---|---|"]
    for reason in list(Reason)[1:]:
        found = traits(reason)
        retry, safe = ("yes" if each else "" for each in (found.retryable, found.safe_to_retry))
        exit_code = EXIT_CODES.get(reason, EXIT_FAILED)
        codes = f"{found.http_status} | {found.grpc_code} | {retry} | {safe} | {exit_code}"
        rows.append(f"| `{reason.name.lower()}` | {meanings[reason.name].replace('|', ' ')} | {codes} |")
    return "\n".join((_HEAD, *rows, ""))
