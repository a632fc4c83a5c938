"""Records answers of a real model for the corpus of bench/repetition.py.

    python -m runner_svc.runtimes.llama_server.xllamacpp_launcher --model FILE --port 8080 --parallel 4 &
    python -m bench.repetition_record http://127.0.0.1:8080

An answer is a loop when the model had to be stopped and its end compresses to less than a tenth; it is legitimate when
the model ended it by itself, or when its end compresses no further than prose does. What is neither is not used: the
detector has no part in the choice. What is on file already is not asked for again.
"""

import argparse
import json
import urllib.request
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CORPUS = Path(__file__).resolve().parent.parent / "tests" / "corpus" / "repetition"
MAX_TOKENS = 1500
TAIL_CHARS = 1500
LOOP_RATIO = 0.10
PROSE_RATIO = 0.30
PARALLEL = 4

TOPICS = (
    "the sea", "a lighthouse keeper", "how bread is made", "the history of paper", "why the sky is blue", "winter",
    "a dog called Rex", "the rules of chess", "growing tomatoes", "the moon", "how a bicycle stays upright",
    "rivers", "an old clock", "the human heart", "learning to swim", "a train journey", "volcanoes", "honey bees",
    "coffee", "maps",
)  # fmt: skip
CHATS = (
    "Write a short story about {}.",
    "Write a poem with a refrain about {}.",
    "List ten facts about {}, numbered.",
    "Write a Python program about {}.",
    "Make a Markdown table with eight rows about {}.",
    "Give me a JSON array of six objects about {}.",
)  # fmt: skip
OPENINGS = (
    "The story of {}: Once upon a time",
    "Here is a list about {}:\n1.",
    "Q: What about {}?\nA:",
    "def describe():\n    # {}\n",
)


def requests() -> Iterator[tuple[str, str, dict[str, object]]]:
    """Name, path and body of every request: chats at temperature 0 and 0.7, raw text at temperature 0."""
    for number, topic in enumerate(TOPICS):
        chat = CHATS[number % len(CHATS)].format(topic)
        for label, temperature in (("greedy", 0.0), ("sampled", 0.7)):
            messages = [{"role": "user", "content": chat}]
            body = {"messages": messages, "temperature": temperature, "seed": number}
            yield f"chat-{label}-{number:02}", "/v1/chat/completions", body
        for shape, other in enumerate(CHATS):
            if shape == number % len(CHATS):
                continue  # asked above
            body = {"messages": [{"role": "user", "content": other.format(topic)}], "temperature": 0.7, "seed": number}
            yield f"chat-more-{number:02}-{shape}", "/v1/chat/completions", body
        for shape, opening in enumerate(OPENINGS):
            if (number + shape) % 2 == 0:
                text = {"prompt": opening.format(topic), "temperature": 0.0}
                yield f"text-{number:02}-{shape}", "/v1/completions", text


def verdict(text: str, finish: str) -> str | None:
    """The folder an answer belongs in; None: it is not clear."""
    tail = text[-TAIL_CHARS:].encode()
    ratio = len(zlib.compress(tail, 9)) / max(len(tail), 1)
    if finish == "length" and ratio < LOOP_RATIO:
        return "looping"
    return "legitimate" if finish == "stop" or ratio > PROSE_RATIO else None


def ask(url: str, path: str, body: dict[str, object]) -> tuple[str, str]:
    """The text of one answer, and why it ended."""
    raw = json.dumps({**body, "max_tokens": MAX_TOKENS}).encode()
    request = urllib.request.Request(url + path, raw, {"Content-Type": "application/json"})  # noqa: S310 - our server
    with urllib.request.urlopen(request, timeout=600) as response:  # noqa: S310 - as above
        choice = json.load(response)["choices"][0]
    return choice.get("text") or choice["message"]["content"], choice["finish_reason"]


def main() -> None:
    """Ask for everything and file it."""
    parser = argparse.ArgumentParser(prog="python -m bench.repetition_record", description=__doc__)
    parser.add_argument("url", help="llama.cpp's server, without a key")
    url = parser.parse_args().url

    def record(job: tuple[str, str, dict[str, object]]) -> None:
        name, path, body = job
        if any(CORPUS.glob(f"*/model-{name}.txt")):
            return
        text, finish = ask(url, path, body)
        folder = verdict(text, finish)
        print(f"{name}: {len(text)} characters, {finish}, {folder}", flush=True)
        if folder is not None and len(text) >= 100:
            (CORPUS / folder / f"model-{name}.txt").write_text(text, encoding="utf-8")

    with ThreadPoolExecutor(PARALLEL) as pool:
        list(pool.map(record, requests()))


if __name__ == "__main__":
    main()
