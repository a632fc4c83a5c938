"""`weft keys sign` and `weft keys approve`, and that a registry takes what they make."""

import base64
import json
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration
from governed_script import AUDIENCE, POLICY, SHARED_KEY, GovernedRegistry, governed_registry
from typer.testing import CliRunner

from registry_svc.config import GovernanceMode
from weft.api.operations.v1.operation_service_pb2 import GetGovernanceResponse
from weft.documents.operation_actions import LoadSettings, load_action
from weft.signing.signatures import public_text, read_private_key, read_signed, sign
from weft.signing.tokens import make_payload, read_payload
from weft_app.cli.main import app

OPTIONS = (
    *("--ctx", "8192", "--quantization", "q8_0", "--budget", "8GiB", "--evict", "small", "--replicas", "2"),
    *("--pin", "--keep-alive", "5m", "--set", "cache_type_k=q8_0", "--set", "gpu_layers=99"),
)
OFFLINE = ("--audience", AUDIENCE, "--policy", POLICY)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[GovernedRegistry]:
    with governed_registry(tmp_path / "home", GovernanceMode.SIGNATURES) as registry:
        yield registry


@pytest.fixture
def token(tmp_path: Path) -> Path:
    return tmp_path / "op.json"


def _sign(registry: GovernedRegistry, token: Path, *words: str) -> None:
    result = registry.run("keys", "sign", *words, "--key", registry.key("alice"), "--as", "alice", "--out", str(token))
    assert (result.exit_code, result.stdout) == (0, ""), result.stderr


def _approve(registry: GovernedRegistry, token: Path, name: str = "bob", *words: str) -> str:
    result = registry.run("keys", "approve", str(token), "--key", registry.key(name), "--as", name, "--yes", *words)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_new_key_is_private_and_never_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "alice.pem"
    made = CliRunner().invoke(app, ["keys", "sign", "new-key", "--out", str(file)])
    assert made.exit_code == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    key = read_private_key(file, "--key")
    assert made.stdout == f'public_key: "{public_text(key)}"\n'
    content = file.read_bytes()
    again = CliRunner().invoke(app, ["keys", "sign", "new-key", "--out", str(file)])
    assert (again.exit_code, again.stdout) == (2, "")
    assert "never overwritten" in again.stderr
    assert file.read_bytes() == content


def test_load_signed_by_two_is_admitted(registry: GovernedRegistry, token: Path) -> None:
    _sign(registry, token, "load", "qwen", *OPTIONS)
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    early = registry.run("load", "qwen", *OPTIONS, "--token", str(token))
    assert (early.exit_code, registry.refused) == (1, ["1 of 2 signers agreed"])
    _approve(registry, token)
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
def test_signature_covers_the_action_of_the_command(
    registry: GovernedRegistry, token: Path, sign_words: tuple[str, ...], words: tuple[str, ...]
) -> None:
    _sign(registry, token, *sign_words)
    _approve(registry, token)
    done = registry.run(*words, "--token", str(token))
    assert done.exit_code == 0, (done.stderr, registry.refused)


def test_approver_sees_the_signed_action(registry: GovernedRegistry, token: Path) -> None:
    _sign(registry, token, "load", "qwen", *OPTIONS)
    lines = _approve(registry, token).splitlines()
    assert AUDIENCE in lines[0]
    assert [line.strip() for line in lines[1:-2]] == [
        "load qwen",
        "cache_type_k: q8_0",
        "context_tokens: 8192",
        "gpu_layers: 99",
        "quantization: q8_0",
        "memory_budget_bytes: 8589934592",
        "keep_alive: 300s",
        "pin: yes",
        "evict_model: small",
        "replicas: 2",
    ]
    assert "alice (1 of 2)" in lines[-2]
    assert lines[-1] == "signed"


def test_signing_requires_confirmation(registry: GovernedRegistry, token: Path) -> None:
    _sign(registry, token, "load", "qwen")
    before = token.read_text()
    for answer in ("n\n", "\n", ""):
        result = registry.run("keys", "approve", str(token), "--key", registry.key("bob"), "--as", "bob", stdin=answer)
        assert result.exit_code == 1
        assert "load qwen" in result.stdout
        assert token.read_text() == before
    yes = registry.run("keys", "approve", str(token), "--key", registry.key("bob"), "--as", "bob", stdin="y\n")
    assert yes.exit_code == 0
    assert token.read_text() != before


def test_approval_can_be_written_to_another_file(registry: GovernedRegistry, token: Path, tmp_path: Path) -> None:
    _sign(registry, token, "load", "qwen")
    before = token.read_text()
    assert "1 of 2" in _approve(registry, token, "bob", "--out", str(tmp_path / "more.json"))
    assert token.read_text() == before
    assert [each.key_id for each in read_signed((tmp_path / "more.json").read_text()).signatures] == ["alice", "bob"]


def _changed(token: Path, **changes: object) -> None:
    """A token whose payload is another, as somebody in between would change it, or a careless tool."""
    document = json.loads(token.read_text())
    payload = json.loads(base64.urlsafe_b64decode(document["payload"] + "=="))
    payload.update(changes)
    document["payload"] = base64.urlsafe_b64encode(json.dumps(payload).encode()).rstrip(b"=").decode()
    token.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"readable": {"loadModel": {"model": "harmless"}}}, "readable form"),
        ({"op": "model-unload"}, "another kind"),
        ({"aud": "reg-other"}, "another registry"),
        ({"policy": "2"}, "another version of the policy"),
        ({"exp": 1, "iat": 0, "nbf": 0}, "expired"),
        ({"iat": 5}, "longer than"),
        ({"extra": 1}, "says more"),
    ],
)
def test_token_that_would_be_rejected_is_not_approved(
    registry: GovernedRegistry, token: Path, changes: dict[str, object], why: str
) -> None:
    _sign(registry, token, "load", "qwen")
    _changed(token, **changes)
    before = token.read_text()
    result = registry.run("keys", "approve", str(token), "--key", registry.key("bob"), "--as", "bob", "--yes")
    assert result.exit_code == 2
    assert why in result.stderr
    assert token.read_text() == before


def test_signer_cannot_approve_twice(registry: GovernedRegistry, token: Path) -> None:
    _sign(registry, token, "load", "qwen")
    result = registry.run("keys", "approve", str(token), "--key", registry.key("bob"), "--as", "alice", "--yes")
    assert (result.exit_code, "counts once" in result.stderr) == (2, True)


def test_expired_token_is_reported(registry: GovernedRegistry, token: Path) -> None:
    terms = GetGovernanceResponse(audience=AUDIENCE, token_lifetime=Duration(seconds=300), policy_version=POLICY)
    payload = make_payload(load_action("qwen", LoadSettings()), terms, now=int(time.time()) - 400)
    token.write_text(sign(payload, read_private_key(Path(registry.key("alice")), "--key"), "alice").as_text())
    result = registry.run("keys", "approve", str(token), "--key", registry.key("bob"), "--as", "bob", "--yes")
    assert result.exit_code == 2
    assert "expired 10" in result.stderr


def test_token_names_are_stripped_of_terminal_escapes(registry: GovernedRegistry, token: Path) -> None:
    terms = GetGovernanceResponse(audience=AUDIENCE, token_lifetime=Duration(seconds=300), policy_version=POLICY)
    hostile = load_action("qwen\n  pin: no\x1b[2J", LoadSettings(pin=True))
    key = read_private_key(Path(registry.key("alice")), "--key")
    token.write_text(sign(make_payload(hostile, terms, now=int(time.time())), key, "ali\x1b[2Jce").as_text())
    shown = _approve(registry, token)
    assert "\x1b" not in shown
    assert '  load "qwen\\n  pin: no' in shown


def test_signing_works_without_a_mesh(tmp_path: Path) -> None:
    home, token = tmp_path / "none", tmp_path / "op.json"
    for name in ("a", "b"):
        assert CliRunner().invoke(app, ["keys", "sign", "new-key", "--out", str(tmp_path / name)]).exit_code == 0
    common = ["--key", str(tmp_path / "a"), "--as", "a", "--out", str(token), "--home", str(home)]
    alone = CliRunner().invoke(app, ["keys", "sign", "load", "qwen", *common])
    assert (alone.exit_code, "weft is not running" in alone.stderr) == (1, True)
    signed = CliRunner().invoke(app, ["keys", "sign", "load", "qwen", *common, *OFFLINE, "--lifetime", "100"])
    assert signed.exit_code == 0
    claims = read_payload(read_signed(token.read_text()).payload_bytes)
    assert (claims.audience, claims.policy_version) == (AUDIENCE, POLICY)
    assert claims.expires_at - claims.issued_at == 100
    common = ["--key", str(tmp_path / "b"), "--as", "b", "--yes", "--home", str(home)]
    agreed = CliRunner().invoke(app, ["keys", "approve", str(token), *common, *OFFLINE])
    assert agreed.exit_code == 0
    assert [each.key_id for each in read_signed(token.read_text()).signatures] == ["a", "b"]


def test_shared_key_signs_for_the_listed_signers(tmp_path: Path) -> None:
    key, token = tmp_path / "model-api.key", tmp_path / "op.json"
    key.write_bytes(SHARED_KEY + b"\n")
    with governed_registry(tmp_path / "home", GovernanceMode.SHARED_KEY) as registry:
        words = ["--shared-key", str(key), "--signer", "alice", "--signer", "bob", "--out", str(token)]
        assert registry.run("keys", "sign", "load", "qwen", *OPTIONS, *words).exit_code == 0
        document = json.loads(token.read_text())
        assert document["opToken"]["signers"] == ["alice", "bob"]
        assert document["opToken"]["maxContextLength"] == 8192
        assert registry.run("load", "qwen", "--token", str(token)).exit_code == 1
        done = registry.run("load", "qwen", *OPTIONS, "--token", str(token))
        assert done.exit_code == 0, (done.stderr, registry.refused)
        refused = registry.run("keys", "sign", "load", "qwen", "--key", registry.key("alice"), "--as", "alice")
        assert "--shared-key" in refused.stderr
        assert refused.exit_code == 1


def test_signing_fails_if_governance_is_off(tmp_path: Path) -> None:
    with governed_registry(tmp_path / "home", GovernanceMode.OFF) as registry:
        result = registry.run("keys", "sign", "unload", "qwen", "--key", registry.key("alice"), "--as", "alice")
        assert (result.exit_code, "nothing to sign" in result.stderr) == (1, True)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("load", "qwen"), "--key"),
        (("load", "qwen", "--key", "alice", "--shared-key", "x"), "--key"),
        (("load", "qwen", "--key", "alice"), "--as"),
        (("load", "qwen", "--key", "alice", "--as", "x y"), "--as"),
        (("load", "qwen", "--key", "alice", "--as", "alice", "--signer", "bob"), "--signer"),
        (("load", "qwen", "--shared-key", "x"), "--signer"),
        (("load", "qwen", "--shared-key", "x", "--signer", "a", "--as", "a"), "--shared-key"),
        (("load", "qwen", "--shared-key", "none", "--signer", "a"), "--shared-key"),
        (("load", "q wen", "--key", "alice", "--as", "alice"), "MODEL"),
        (("load", "qwen", "--evict", "a b", "--key", "alice", "--as", "alice"), "--evict"),
        (("load", "qwen", "--key", "nowhere.pem", "--as", "alice"), "--key"),
        (("load", "qwen", "--key", "alice", "--as", "mallory"), "--as"),
        (("load", "qwen", "--key", "alice", "--as", "alice", "--audience", "x"), "--policy"),
        (("load", "qwen", "--key", "alice", "--as", "alice", "--policy", "x"), "--audience"),
        (("load", "qwen", "--key", "alice", "--as", "alice", "--out", "/nowhere/op.json"), "--out"),
        (("flush", "--scope", "tenant", "--key", "alice", "--as", "alice"), "--tenant"),
        (("flush", "--scope", "all", "--runner", "a b", "--key", "alice", "--as", "alice"), "--runner"),
    ],
)
def test_invalid_option_is_reported(registry: GovernedRegistry, words: tuple[str, ...], named: str) -> None:
    whole = [
        registry.key("alice") if word == "alice" and words[n - 1] == "--key" else word for n, word in enumerate(words)
    ]
    result = registry.run("keys", "sign", *whole)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"weft: {named}:")


@pytest.mark.parametrize("content", [b"", b"hello", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"])
def test_invalid_key_file_is_reported(registry: GovernedRegistry, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    result = registry.run("keys", "sign", "load", "qwen", "--key", str(tmp_path / "key"), "--as", "alice")
    assert result.exit_code == 2
    assert "must be an Ed25519 private key" in result.stderr


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b"{" * 20_000, b'{"payload": "", "signatures": []}'])
def test_invalid_token_file_is_reported(registry: GovernedRegistry, token: Path, content: bytes) -> None:
    token.write_bytes(content)
    result = registry.run("keys", "approve", str(token), "--key", registry.key("bob"), "--as", "bob", "--yes")
    assert result.exit_code == 2
    assert result.stderr.startswith("weft: FILE:")
