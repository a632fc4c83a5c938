"""`weft keys sign`, and that a registry takes what it makes."""

import json
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from governed_script import GovernedRegistry, governed_registry

from registry_svc.registry_config import GovernanceMode

OPTIONS = (
    *("--ctx", "8192", "--quantization", "q8_0", "--budget", "8GiB", "--evict", "small", "--replicas", "2"),
    *("--pin", "--keep-alive", "5m", "--set", "cache_type_k=q8_0", "--set", "gpu_layers=99"),
)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[GovernedRegistry]:
    with governed_registry(tmp_path / "home", GovernanceMode.SHARED_KEY) as registry:
        yield registry


@pytest.fixture
def token(tmp_path: Path) -> Path:
    return tmp_path / "op.json"


def _sign(registry: GovernedRegistry, token: Path, *words: str, by: tuple[str, ...] = ("alice", "bob")) -> None:
    signers = [word for name in by for word in ("--signer", name)]
    result = registry.run("keys", "sign", *words, "--shared-key", registry.key, *signers, "--out", str(token))
    assert (result.exit_code, result.stdout) == (0, ""), result.stderr


def test_load_signed_for_two_is_admitted(registry: GovernedRegistry, token: Path) -> None:
    _sign(registry, token, "load", "qwen", *OPTIONS, by=("alice",))
    early = registry.run("load", "qwen", *OPTIONS, "--token", str(token))
    assert (early.exit_code, registry.refused) == (1, ["1 of 2 signers agreed"])
    _sign(registry, token, "load", "qwen", *OPTIONS)
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    document = json.loads(token.read_text())
    assert (document["opToken"]["signers"], document["opToken"]["maxContextLength"]) == (["alice", "bob"], 8192)
    assert registry.run("load", "qwen", "--token", str(token)).exit_code == 1, "other options"
    done = registry.run("load", "qwen", *OPTIONS, "--token", str(token))
    assert done.exit_code == 0, (done.stderr, registry.refused)
    assert registry.admitted[0][1].signers == ("alice", "bob")


@pytest.mark.parametrize(
    ("sign_words", "words"),
    [
        (("unload", "qwen"), ("unload", "qwen")),
        (("flush", "--scope", "tenant", "--tenant", "acme"), ("models", "flush", "--tenant", "acme")),
        (("flush", "--scope", "all"), ("models", "flush", "--all")),
        (("flush", "--all"), ("models", "flush", "--all")),
        (("flush", "--tenant", "acme"), ("models", "flush", "--tenant", "acme")),
        (("flush", "--model", "m-1", "--runner", "r1"), ("models", "flush", "--model", "m-1", "--runner", "r1")),
        (
            ("flush", "--scope", "tag", "--tag", "t", "--runner", "r1"),
            ("models", "flush", "--tag", "t", "--runner", "r1"),
        ),
    ],
)
def test_token_covers_the_action_of_the_command(
    registry: GovernedRegistry, token: Path, sign_words: tuple[str, ...], words: tuple[str, ...]
) -> None:
    _sign(registry, token, *sign_words)
    done = registry.run(*words, "--token", str(token))
    assert done.exit_code == 0, (done.stderr, registry.refused)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("load", "qwen", "--shared-key", "none", "--signer", "a"), "--shared-key"),
        (("load", "qwen", "--shared-key", "key", "--signer", "a b"), "--signer"),
        (("load", "q wen", "--shared-key", "key", "--signer", "a"), "MODEL"),
        (("load", "qwen", "--evict", "a b", "--shared-key", "key", "--signer", "a"), "--evict"),
        (("load", "qwen", "--shared-key", "key", "--signer", "a", "--out", "/nowhere/op.json"), "--out"),
        (("flush", "--scope", "tenant", "--shared-key", "key", "--signer", "a"), "--tenant"),
        (("flush", "--scope", "all", "--runner", "a b", "--shared-key", "key", "--signer", "a"), "--runner"),
    ],
)
def test_invalid_option_is_reported(registry: GovernedRegistry, words: tuple[str, ...], named: str) -> None:
    whole = [registry.key if word == "key" else word for word in words]
    result = registry.run("keys", "sign", *whole)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"weft: {named}:")


@pytest.mark.parametrize(
    "words", [("load", "qwen", "--signer", "a"), ("load", "qwen", "--shared-key", "x")], ids=["no key", "no signer"]
)
def test_key_and_a_signer_must_be_given(registry: GovernedRegistry, words: tuple[str, ...]) -> None:
    result = registry.run("keys", "sign", *words)
    assert result.exit_code == 2
    assert "missing option" in result.stderr
