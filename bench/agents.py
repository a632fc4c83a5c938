"""A coding agent and its five sub-agents on the demo model: the cached share of each, through weft and without it.

The session is synthesized in the form of Claude Code's: the Messages API, a first system block that differs with every
request, one session id, an agent id for each sub-agent, and tool results as user turns. The main agent takes three
turns, then five sub-agents take ten each concurrently, then the main agent takes seven more: 60 turns over four slots.
What could be cached of a prompt is what it has in common with any earlier prompt and answer.

    python -m bench.agents
"""

import contextlib
import random
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import Any

import msgspec

from bench.contender import MODEL, WEFT_REAL, Contender
from bench.launch import answering, post
from bench.sessions import words
from weft_app.compose.demo import demo_model_path

MAIN, SUB_AGENTS = "main", tuple(f"sub-{number}" for number in range(1, 6))
TURNS, MAIN_TURNS_BEFORE, TOOL_SECONDS, ANSWER_TOKENS = 10, 3, 0.2, 8
SYSTEM_CHARS, TASK_CHARS, RESULT_CHARS = 1_200, 300, 500
PLAIN = Contender(
    name="llama-server",
    command=(
        *("{python}", "-m", "runner_svc.runtimes.llama_server.xllamacpp_launcher", "--model", "{model}"),
        *("--port", "{port}", "--parallel", "4", "--ctx-size", "8192", "--slots", "--jinja"),
    ),
    ready_path="/health",
)
"""The engine of the demo with its own prompt cache, in the host's memory too."""
TWO = replace(
    WEFT_REAL,
    command=(*WEFT_REAL.command, "--config", "{config}"),
    config="""\
router: {queue_timeout_seconds: 300}
runners:
  - {name: a, models: [{name: smol-a, pool: smol, path: "{model}"}]}
  - {name: b, models: [{name: smol-b, pool: smol, path: "{model}"}]}
""",
    model="smol",
)
ONE = replace(TWO, config=TWO.config[: TWO.config.rindex("  - ")])
BILLING = "x-anthropic-billing-header: cc_version=2.1.101.e51; cc_entrypoint=cli; cch={};"
"""The engine alone leaves it in the prompt, with a constant at its end, and weft leaves it out."""


@dataclass(eq=False)
class Agent:
    """An agent, and the tokens of its prompts."""

    name: str
    chance: random.Random
    messages: list[dict[str, str]] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cacheable_tokens: int = 0

    @property
    def system(self) -> str:
        """The system prompt: sub-agents have the same."""
        return words(SYSTEM_CHARS, random.Random(self.name == MAIN))  # noqa: S311 - a workload


class Replay:
    """One replay of the session."""

    def __init__(self, port: int, model: str, tokenizer: int) -> None:
        """`tokenizer`: the port of an engine."""
        self._port, self._model, self._tokenizer = port, model, tokenizer
        self._seen: list[Sequence[int]] = []
        self._agents = [Agent(name, random.Random(name)) for name in (MAIN, *SUB_AGENTS)]  # noqa: S311

    def run(self) -> list[Agent]:
        """Takes all turns, and returns the agents."""
        main, *subs = self._agents
        self._take(main, MAIN_TURNS_BEFORE)
        with ThreadPoolExecutor(len(subs)) as pool:
            list(pool.map(lambda agent: self._take(agent, TURNS), subs))
        self._take(main, TURNS - MAIN_TURNS_BEFORE)
        return self._agents

    def _take(self, agent: Agent, turns: int) -> None:
        for _ in range(turns):
            chars = RESULT_CHARS if agent.messages else TASK_CHARS
            agent.messages.append({"role": "user", "content": words(chars, agent.chance)})
            system = agent.system if self._model != MODEL else BILLING.format("fffff") + agent.system
            conversation = [{"role": "system", "content": system}, *agent.messages]
            prompt, seen = self._tokens_of(conversation), list(self._seen)
            answer, usage = self._ask(agent)
            cached = usage.get("cache_read_input_tokens", 0)
            agent.cached_tokens += cached
            agent.prompt_tokens += usage["input_tokens"] + cached
            agent.cacheable_tokens += max((sum(takewhile(bool, map(eq, each, prompt))) for each in seen), default=0)
            agent.messages.append({"role": "assistant", "content": answer})
            self._seen.append(self._tokens_of([*conversation, agent.messages[-1]]))
            time.sleep(agent.chance.random() * TOOL_SECONDS)

    def _ask(self, agent: Agent) -> tuple[str, dict[str, int]]:
        billing = BILLING.format(agent.chance.randbytes(3).hex()[:5])
        ids = {"X-Claude-Code-Session-Id": "s"} | ({} if agent.name == MAIN else {"X-Claude-Code-Agent-Id": agent.name})
        body = {
            "model": self._model,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "system": [{"type": "text", "text": billing}, {"type": "text", "text": agent.system}],
            "messages": agent.messages,
        }
        answer: Any = msgspec.json.decode(post(self._port, "/v1/messages", body, ids, 120.0))
        return "".join(part.get("text", "") for part in answer["content"]), answer["usage"]

    def _tokens_of(self, messages: list[dict[str, str]]) -> Sequence[int]:
        body = {"messages": messages, "add_generation_prompt": messages[-1]["role"] == "user"}
        text = msgspec.json.decode(post(self._tokenizer, "/apply-template", body))["prompt"]
        answer = post(self._tokenizer, "/tokenize", {"content": text, "parse_special": True})
        return msgspec.convert(msgspec.json.decode(answer)["tokens"], list[int])


def main() -> None:
    """Print a table of the agents."""
    root, values = Path(__file__).parents[1], {"model": str(demo_model_path())}
    print("| way | agent | prompt tokens | could be cached | cached | share of that |\n" + "|---" * 6 + "|")
    with tempfile.TemporaryDirectory() as name, answering(PLAIN, root, Path(name) / "plain", values) as (_, _, plain):
        for way, contender in {"llama-server": None, "weft, 1 runner": ONE, "weft, 2 runners": TWO}.items():
            with contextlib.ExitStack() as stack:
                port, model = plain, MODEL
                if contender is not None:
                    port = stack.enter_context(answering(contender, root, Path(name) / way[-9:], values))[2]
                    model = contender.model
                for agent in Replay(port, model, plain).run():
                    share = agent.cached_tokens / agent.cacheable_tokens
                    counts = f"{agent.prompt_tokens} | {agent.cacheable_tokens} | {agent.cached_tokens}"
                    print(f"| {way} | {agent.name} | {counts} | {share:.3f} |", flush=True)


if __name__ == "__main__":
    main()
