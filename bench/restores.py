"""Time to the first token of a known prompt after its engine ended, and whether greedy answers stay equal.

Two runners share memory for one of three engines of the demo model, so that each load of another one is a swap. The
engine is loaded before a request is measured.

    python -m bench.restores [RUNNER [SIZE]...]   # settings of the runners, such as 'runtime: llama_cpp_python', and 8k
"""

import http.client
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import msgspec

from bench.agents import PLAIN
from bench.contender import WEFT_REAL
from bench.launch import answering, post
from bench.sessions import words
from weft_app.compose.demo import demo_model_path

ROOT = Path(__file__).parents[1]
CHARS, ANSWER_TOKENS, REPORT_SECONDS = {"1k": 5_600, "4k": 22_400, "8k": 45_000}, 256, 6.0
SMOL = 'path: "{model}", slots: 1, context_tokens: 8192, repetition: "off"'
MESH = replace(
    WEFT_REAL,
    command=(*WEFT_REAL.command, "--config", "{config}"),
    config=f"""\
router: {{queue_timeout_seconds: 3600}}
accelerators: {{declared: [{{name: budget, memory_mb: 2200}}]}}
runners:
  - {{name: a, {{more}} models: [{{name: smol-a, pool: smol, {SMOL}}}, {{name: other, {SMOL}, start_asleep: true}}]}}
  - {{name: b, {{more}} models: [{{name: smol-b, pool: smol, {SMOL}, start_asleep: true}}]}}
""",
    model="smol-a",
)
SERVER = replace(PLAIN, command=(*PLAIN.command, "--parallel", "1", "--slot-save-path", "{saved}"), model="smol")


def ask(port: int, model: str, text: str) -> tuple[float, int, str]:
    """Returns the seconds to the first token of a greedy answer, the cached tokens of the prompt, and the answer."""
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": ANSWER_TOKENS}
    body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    first, cached, answer, began = 0.0, 0, "", time.monotonic()
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=3_600.0)) as connection:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", msgspec.json.encode(body), headers)
        for line in connection.getresponse():
            event = msgspec.json.decode(line[6:]) if line.startswith(b"data: {") else {}
            piece = "".join(choice["delta"].get("content") or "" for choice in event.get("choices") or ())
            first = first or (time.monotonic() - began if piece else 0.0)
            answer += piece
            cached = ((event.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens", cached)
    return first, cached, answer


def measure_mesh(folder: Path, more: str, text: str) -> Iterator[tuple[str, float, int, str]]:
    """Yields what a request to a mesh needs at first, and after each event."""
    values = {"model": str(demo_model_path()), "more": f"{more}, " if more else ""}

    def weft(*arguments: str) -> None:
        command = [str(Path(sys.executable).with_name("weft")), *arguments, "--home", str(folder / "home")]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    with ExitStack() as stack:
        _, process, port = stack.enter_context(answering(MESH, ROOT, folder, values))
        yield "weft, processes it", *ask(port, "smol-a", text)
        yield "in its slot", *ask(port, "smol-a", text)
        weft("load", "other", "--evict", "smol-a")
        weft("load", "smol-a", "--evict", "other")
        yield "swap", *ask(port, "smol-a", text)
        weft("unload", "smol-a")
        weft("load", "smol-a")
        yield "unload and load", *ask(port, "smol-a", text)
        for child in process.children(recursive=True):
            if values["model"] in child.cmdline():
                child.kill()
        weft("load", "smol-a")
        yield "engine killed", *ask(port, "smol-a", text)
        stack.close()
        _, _, port = stack.enter_context(answering(MESH, ROOT, folder, values))
        yield "mesh restarted", *ask(port, "smol-a", text)
        weft("load", "smol-b", "--evict", "smol-a")
        time.sleep(REPORT_SECONDS)
        yield "second runner", *ask(port, "smol", text)


def measure_server(folder: Path, text: str) -> Iterator[tuple[str, float, int, str]]:
    """Yields what a restarted llama-server needs, without and with a slot that its operator has saved."""
    for action, name in (("save", "llama-server, processes it"), ("restore", "llama-server, restores it")):
        values = {"model": str(demo_model_path()), "saved": str(folder)}
        with answering(SERVER, ROOT, folder, values) as (_, _, port):
            began = time.monotonic()
            if action == "restore":
                post(port, "/slots/0?action=restore", {"filename": "slot"}, seconds=60.0)
            restoring, (first, cached, answer) = time.monotonic() - began, ask(port, "smol", text)
            yield name, restoring + first, cached, answer
            if action == "save":
                post(port, "/slots/0?action=save", {"filename": "slot"}, seconds=60.0)


def main(more: str = "", *sizes: str) -> None:
    """Prints a table. Answers are compared with the one of a prompt in its slot."""
    print("| prompt | event | first token (s) | of processing | cached tokens | answer |\n" + "|---" * 6 + "|")
    for size in sizes or CHARS:
        text = f"Tell this story again. {words(CHARS[size], random.Random(size))}"  # noqa: S311 - a workload
        with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
            whole, answers = 0.0, list[str]()
            for measure in (measure_mesh(Path(folder) / "mesh", more, text), measure_server(Path(folder), text)):
                for name, first, cached, answer in measure:
                    whole, answers = whole or first, [*answers, answer]
                    verdict = "equal" if answer == answers[:2][-1] else "differs"
                    print(f"| {size} | {name} | {first:.2f} | {first / whole:.3f} | {cached} | {verdict} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
