"""The blocks in an engine's prefix cache, as it reports them, and the prompt prefixes that end in them. Pure.

Engines name a block by a hash over everything before it and the cache salt, and report with each stored block the
request that stored it. A prefix is cached while the block in which it ends and all blocks before that are.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

from runner_svc.policy.cache_directory import Partition
from weft.kernel.requests.request_values import PREFIX_ENDS

BlockHash = int | bytes

MAX_BLOCKS = 131_072
"""Maximum number of known blocks, about 45 MB; beyond it, new ones stay unknown until others are removed."""
MAX_PREFIXES = 16_384
"""Maximum number of known prefixes; beyond it, new ones stay unknown until others are lost."""
MAX_PROMPTS = 4_096
"""Maximum number of requests whose blocks are looked for; the oldest is dropped first."""


@dataclass(frozen=True, slots=True)
class PromptPrefixes:
    """The prefixes of a prompt, for which routers look."""

    digests: tuple[int, ...]
    """Digests of the prefixes that end at PREFIX_ENDS."""
    char_count: int
    """Length of the whole prompt."""
    partition: Partition


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBlocks:
    """Consecutive blocks that a request stored."""

    hashes: Sequence[BlockHash]
    parent: BlockHash | None
    """The block before them; None: they begin a prompt."""
    token_count: int
    """Tokens of each block."""
    request_id: str = ""
    """Empty: unknown."""


@dataclass(frozen=True, slots=True)
class RemovedBlocks:
    """Blocks that the engine has evicted."""

    hashes: Sequence[BlockHash]


@dataclass(frozen=True, slots=True)
class ClearedCache:
    """The engine has emptied its cache."""


BlockEvent = StoredBlocks | RemovedBlocks | ClearedCache


@dataclass(slots=True)
class PrefixChanges:
    """Changes of the known prefixes."""

    restart: bool = False
    """Whether all earlier knowledge is void."""
    cleared: bool = False
    """Whether the engine has emptied its cache."""
    held: dict[int, bool] = field(default_factory=dict)
    """Digests of changed prefixes, and whether they are cached now."""

    def __bool__(self) -> bool:
        return self.restart or self.cleared or bool(self.held)

    def add(self, later: "PrefixChanges") -> None:
        """Adds later changes."""
        if later.restart or later.cleared:
            self.held.clear()
        self.restart = self.restart or later.restart
        self.cleared = self.cleared or later.cleared
        self.held |= later.held


@dataclass(slots=True)
class _Block:
    parent: BlockHash | None
    end: int
    """Tokens from the beginning of the prompt to its end."""
    children: list[BlockHash] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Prompt:
    prefixes: PromptPrefixes
    token_count: int = 0
    """0: not counted yet."""
    last_block: BlockHash | None = None
    placed: int = 0
    """How many of its prefixes have a block."""


class EngineBlocks:
    """The known blocks and prefixes of one engine process. A removed block counts as removed even if it has a copy."""

    def __init__(self) -> None:
        self._blocks: dict[BlockHash, _Block] = {}
        self._prefixes: dict[int, tuple[BlockHash, Partition]] = {}
        self._prompts: OrderedDict[str, _Prompt] = OrderedDict()
        self._changes = PrefixChanges()

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def prefixes(self) -> list[int]:
        """Digests of the prefixes that are cached."""
        return list(self._prefixes)

    def take_changes(self) -> PrefixChanges:
        """Returns the changes since the last call."""
        changes, self._changes = self._changes, PrefixChanges()
        return changes

    def expect(self, request_id: str, prefixes: PromptPrefixes) -> None:
        """Looks for the blocks of a request that is sent to the engine; later calls for the same prompt are ignored.

        Callers may use an id again for another prompt.
        """
        known = self._prompts.get(request_id)
        if known is None or known.prefixes != prefixes:
            self._prompts[request_id] = _Prompt(prefixes)
            if len(self._prompts) > MAX_PROMPTS:
                self._prompts.popitem(last=False)

    def note_prompt_tokens(self, request_id: str, token_count: int) -> None:
        """Records the engine's count of the tokens of a request's first prompt."""
        prompt = self._prompts.get(request_id)
        if prompt is not None and not prompt.token_count:
            prompt.token_count = token_count
            self._place(prompt)

    def apply(self, event: BlockEvent) -> None:
        """Applies what the engine reports next."""
        match event:
            case StoredBlocks():
                self._store(event)
            case RemovedBlocks():
                for block_hash in event.hashes:
                    self._remove(block_hash)
            case ClearedCache():
                self._drop_all()
                self._changes.add(PrefixChanges(cleared=True))

    def restart(self) -> None:
        """Forgets everything, because reports are missing."""
        self._drop_all()
        self._changes.add(PrefixChanges(restart=True))

    def forget(self, tenant: str | None, tag: str | None) -> None:
        """Forgets the prefixes of a tenant and a tag, which will not be used any more; None: any."""
        for digest, (block_hash, partition) in list(self._prefixes.items()):
            if partition.is_meant(tenant, tag):
                self._blocks[block_hash].digests.remove(digest)
                self._lose(digest)
        for request_id, prompt in list(self._prompts.items()):
            if prompt.prefixes.partition.is_meant(tenant, tag):
                del self._prompts[request_id]

    def _store(self, stored: StoredBlocks) -> None:
        before = None if stored.parent is None else self._blocks.get(stored.parent)
        if stored.parent is not None and before is None:
            return
        parent, end = stored.parent, 0 if before is None else before.end
        for block_hash in stored.hashes:
            block = self._blocks.get(block_hash)
            if block is None:
                if len(self._blocks) >= MAX_BLOCKS:
                    return
                block = self._blocks[block_hash] = _Block(parent, end + stored.token_count)
                if before is not None:
                    before.children.append(block_hash)
            parent, before, end = block_hash, block, block.end
        prompt = self._prompts.get(stored.request_id)
        if prompt is not None:
            prompt.last_block = parent
            self._place(prompt)

    def _place(self, prompt: _Prompt) -> None:
        """Finds the last cached block of each of a prompt's prefixes, for the prefixes whose blocks are stored."""
        digests = prompt.prefixes.digests
        last = None if prompt.last_block is None else self._blocks.get(prompt.last_block)
        if last is None or not prompt.token_count or prompt.placed == len(digests):
            return
        # Only the whole prompt is counted in tokens; its text is assumed to be even.
        tokens_per_char = prompt.token_count / max(1, prompt.prefixes.char_count)
        ends = [ceil(end * tokens_per_char) for end in PREFIX_ENDS[prompt.placed : len(digests)]]
        if ends[0] > last.end:
            return
        path = self._path_to(prompt.last_block)
        position = 0
        for end in ends:
            while position < len(path) and self._blocks[path[position]].end < end:
                position += 1
            if position == len(path):
                return
            self._hold(digests[prompt.placed], path[position], prompt.prefixes.partition)
            prompt.placed += 1

    def _path_to(self, block_hash: BlockHash | None) -> list[BlockHash]:
        path: list[BlockHash] = []
        while block_hash is not None:
            path.append(block_hash)
            block_hash = self._blocks[block_hash].parent
        return path[::-1]

    def _hold(self, digest: int, block_hash: BlockHash, partition: Partition) -> None:
        known = self._prefixes.get(digest)
        if known is not None:
            self._blocks[known[0]].digests.remove(digest)
        elif len(self._prefixes) >= MAX_PREFIXES:
            return
        self._prefixes[digest] = (block_hash, partition)
        self._blocks[block_hash].digests.append(digest)
        self._changes.held[digest] = True

    def _remove(self, block_hash: BlockHash) -> None:
        """Removes a block and all that follow it, which are not found without it."""
        block = self._blocks.get(block_hash)
        if block is None:
            return
        if block.parent is not None:
            self._blocks[block.parent].children.remove(block_hash)
        following = [block_hash]
        while following:
            removed = self._blocks.pop(following.pop())
            following += removed.children
            for digest in removed.digests:
                self._lose(digest)

    def _lose(self, digest: int) -> None:
        del self._prefixes[digest]
        self._changes.held[digest] = False

    def _drop_all(self) -> None:
        self._blocks.clear()
        self._prefixes.clear()
        for prompt in self._prompts.values():
            prompt.last_block, prompt.placed = None, 0
