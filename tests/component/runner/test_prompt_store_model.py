"""The prompt store against a model of it: random saves, restores, flushes, damage and restarts; and a kill."""

import asyncio
import signal
import subprocess
import sys
import tempfile
from io import BytesIO
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from runner_svc.cache.prompt_store import PromptStore
from runner_svc.policy.cache_directory import Partition
from runner_svc.policy.kept_prompts import KeptPrompt

BUDGET = 40
TENANTS = st.sampled_from(["a", "b"])
TAGS = st.sampled_from(["", "t"])
MODELS = st.sampled_from(["m", "n"])
SAVES = st.tuples(st.just("save"), TENANTS, TAGS, MODELS, st.binary(min_size=1, max_size=30), st.integers(1, 4))
FLUSHES = st.tuples(st.just("flush"), st.none() | TENANTS, st.none() | TAGS, st.none() | MODELS)
OTHERS = st.sampled_from([("reopen",), ("damage",), ("restore",)])


class _Checked:
    """A store, and the states of the prompts that it may return."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = PromptStore(folder, BUDGET)
        self.states: dict[str, tuple[KeptPrompt, bytes]] = {}
        self.count = 0

    async def save(self, tenant: str, tag: str, model: str, state: bytes, mark_count: int) -> None:
        self.count += 1
        prompt = KeptPrompt(
            name=f"p{self.count}",
            partition=Partition(tenant, tag),
            marks=tuple(bytes([number]) for number in range(mark_count)),
            byte_count=len(state),
            identity=f"{model}:1",
        )
        self.states[prompt.name] = prompt, state
        self.store.put(prompt, BytesIO(state))
        await self.store.settle()

    async def flush(self, tenant: str | None, tag: str | None, model: str | None) -> None:
        def is_meant(prompt: KeptPrompt) -> bool:
            return prompt.partition.is_meant(tenant, tag) and model in (None, prompt.model)

        others = [prompt for prompt in self.store.prompts if not is_meant(prompt)]
        self.store.forget(tenant, tag, model)
        assert list(self.store.prompts) == others
        for name, (prompt, _) in list(self.states.items()):
            if is_meant(prompt):
                del self.states[name]

    async def reopen(self) -> None:
        before = {prompt.name for prompt in self.store.prompts}
        self.store = PromptStore(self.folder, BUDGET)
        await self.store.open()
        assert {prompt.name for prompt in self.store.prompts} <= before

    async def damage(self) -> None:
        """Cuts the last byte of each second file."""
        for file in sorted(self.folder.glob("*.prompt"))[::2]:
            file.write_bytes(file.read_bytes()[:-1])
            self.states.pop(file.stem, None)

    async def restore(self) -> None:
        for prompt in self.store.prompts:
            target = self.folder.parent / "state"
            if await self.store.read(prompt, target):
                assert self.states[prompt.name] == (prompt, target.read_bytes())

    def check(self) -> None:
        held = list(self.store.prompts)
        assert self.store.prompts.byte_count == sum(prompt.byte_count for prompt in held) <= BUDGET
        assert {file.stem for file in self.folder.glob("*.prompt")} == {prompt.name for prompt in held}
        assert {file.suffix for file in self.folder.iterdir()} <= {"", ".prompt"}


@given(st.lists(SAVES | FLUSHES | OTHERS, min_size=1, max_size=12))
def test_store_returns_only_what_was_saved_and_not_flushed(steps: list[tuple[object, ...]]) -> None:
    async def play(folder: Path) -> None:
        checked = _Checked(folder)
        await checked.store.open()
        for name, *values in [*steps, ("restore",)]:
            await getattr(checked, str(name))(*values)
            checked.check()

    with tempfile.TemporaryDirectory() as place:
        asyncio.run(play(Path(place) / "prompts"))


_DIES = """
import asyncio, os, signal, sys
from io import BytesIO
from pathlib import Path
from runner_svc.cache.prompt_store import PromptStore
from runner_svc.policy.cache_directory import Partition
from runner_svc.policy.kept_prompts import KeptPrompt

class Deadly(BytesIO):
    def read(self, size=-1):
        if self.tell():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(2)

async def main():
    store = PromptStore(Path(sys.argv[1]), 100)
    await store.open()
    for name, state in (("whole", BytesIO(b"state")), ("part", Deadly(b"other"))):
        prompt = KeptPrompt(name=name, partition=Partition(name), marks=(b"1",), byte_count=5, identity="m:1")
        store.put(prompt, state)
        await store.settle()

asyncio.run(main())
"""


async def test_kill_in_a_save_leaves_the_other_prompts_and_no_part_of_this_one(tmp_path: Path) -> None:
    folder, target = tmp_path / "prompts", tmp_path / "state"
    died = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", _DIES, str(folder)], check=False)
    assert died.returncode == -signal.SIGKILL
    assert (folder / "part.new").exists(), "it was killed while it wrote"
    store = PromptStore(folder, 100)
    await store.open()
    (prompt,) = store.prompts
    assert prompt.name == "whole"
    assert await store.read(prompt, target)
    assert target.read_bytes() == b"state"
    assert {file.name for file in folder.iterdir()} == {"key", "whole.prompt"}
