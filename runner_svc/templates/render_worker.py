"""The program that renders chat templates for its parent: `python -I render_worker.py <parent pid>`.

It reads requests and writes answers, each a line of JSON, and does not import weft. Templates come from untrusted model
files; a template can only exhaust this process, which has tight limits and is killed when it takes too long.
"""

import ctypes
import json
import os
import resource
import signal
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

PR_SET_PDEATHSIG = 1
MAX_REASON_CHARS = 200
COMPILED_TEMPLATES = 8
CPU_SECONDS = 2.0
"""Processor time limit of a rendering. Some templates take quadratic time: Gemma 4's 0.7 s for 700 messages."""
MEMORY_BYTES = 512 * 1024 * 1024
"""Address space limit of the process, including its interpreter. Enforced on Linux, not on macOS."""
MAX_OUTPUT_BYTES = 4 * 1024 * 1024

TEMPLATE, LIMITS, CONVERSATION = "template", "limits", "conversation"


class GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}` marks text of the model for training; it has no effect here."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Returns the body of the block."""
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class RefusedByTemplateError(Exception):
    """The template called raise_exception."""


def raise_exception(message: object = "") -> None:
    """Rejects a conversation; called by templates."""
    raise RefusedByTemplateError(str(message)[:MAX_REASON_CHARS])


def strftime_now(layout: str) -> str:
    """Returns the local time, for templates that tell the model the date."""
    return datetime.now().astimezone().strftime(layout)


def tojson(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Returns JSON in the form of training data; jinja2's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Returns the environment that chat templates are written for, that of the transformers library."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = tojson
    made.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return made


ENVIRONMENT = environment()


@lru_cache(COMPILED_TEMPLATES)
def compiled(source: str) -> jinja2.Template:
    """Returns the compiled template, from a cache."""
    return ENVIRONMENT.from_string(source)


def render(source: str, variables: dict[str, Any]) -> dict[str, str]:
    """Returns the answer: `text`, or `cause` and `message`."""
    try:
        pieces, size = [], 0
        for piece in compiled(source).generate(variables):
            size += len(piece.encode("utf-8", "surrogatepass"))
            if size > MAX_OUTPUT_BYTES:
                return {"cause": LIMITS, "message": f"it writes more than {MAX_OUTPUT_BYTES} bytes"}
            pieces.append(piece)
        return {"text": "".join(pieces)}
    except Exception as error:  # noqa: BLE001 - any exception of a template is its failure
        cause, message = verdict(error)
        return {"cause": cause, "message": message}


def verdict(error: Exception) -> tuple[str, str]:
    """Returns the cause and message of a failure, without the template's text unless the template rejected it."""
    match error:
        case RefusedByTemplateError():
            words = "".join(letter if letter.isprintable() else " " for letter in str(error))
            return CONVERSATION, words
        case jinja2.TemplateSyntaxError():
            return TEMPLATE, "its syntax is invalid"
        case jinja2.exceptions.SecurityError():
            return LIMITS, "it accesses something that templates must not use"
        case MemoryError() | RecursionError() | OverflowError():
            return LIMITS, f"it exceeds a limit ({type(error).__name__})"
        case _:
            return TEMPLATE, f"it fails with {type(error).__name__}"


def confine(parent: int) -> None:
    """Ties the process to its parent's life, and sets its limits."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent died")
    for what, limit in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 16),
    ):
        # The machine's hard limit cannot be raised.
        hard = resource.getrlimit(what)[1]
        low = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(what, (low, low))


def write(line: str) -> None:
    """Sends a line to the parent."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Writes an empty line, then answers requests until the parent closes the pipe."""
    confine(int(sys.argv[1]))
    write("")
    for line in sys.stdin.buffer:
        # Beyond this limit the kernel kills this process.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        request = json.loads(line)
        answer = render(request["template"], request["variables"])
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        write(json.dumps(answer))


if __name__ == "__main__":
    main()
