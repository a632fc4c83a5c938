"""`weft keys` against a registry that runs as a process of its own."""

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from registry_process import key_ring, serving_registry, stop_in_order, weft

from weft.kernel.access.principal import Principal, authenticate, parse_scopes
from weft.kernel.errors.error_tree import WeftError
from weft_app.cli.keys import KeyRole, scopes_of

KEY = re.compile(r"weft_[a-z0-9]{12}_[0-9a-f]{64}")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home on which a registry serves."""
    folder = tmp_path_factory.mktemp("keys")
    with serving_registry(folder) as process:
        yield folder
        stop_in_order(process)


async def principal(home: Path, text: str) -> Principal | None:
    """Who the holder of a key is; None: nobody."""
    try:
        return authenticate(await key_ring(home), text, datetime.now(UTC))
    except WeftError:
        return None


async def test_key_is_printed_once_with_a_usage_example(home: Path) -> None:
    done = weft(home, "keys", "create", "--tenant", "team-a", "--description", "Ann's notebook", "--expires", "90d")
    assert done.exit_code == 0, done.output
    text = KEY.findall(done.stdout)[0]
    assert f"-H 'Authorization: Bearer {text}'" in done.stdout
    found = await principal(home, text)
    assert found is not None
    assert found.tenant == "team-a"
    assert found.access == parse_scopes(scopes_of(KeyRole.USER), "scopes")

    key_id, secret = text.split("_")[1:]
    for output in ("table", "json", "yaml", "name"):
        listed = weft(home, "keys", "list", "-o", output).stdout
        assert key_id in listed
        assert secret not in listed
    (row,) = [
        row for row in json.loads(weft(home, "keys", "list", "-o", "json").stdout)["items"] if row["id"] == key_id
    ]
    assert (row["state"], row["description"], row["tenant"]) == ("good", "Ann's notebook", "team-a")
    lasts = datetime.fromisoformat(row["expireTime"]) - datetime.fromisoformat(row["createTime"])
    assert lasts == timedelta(days=90)


async def test_rotated_key_has_two_valid_secrets_temporarily_and_a_revoked_key_has_none(home: Path) -> None:
    first = weft(home, "keys", "create", "-o", "name").stdout.strip()
    assert KEY.fullmatch(first)
    key_id = first.split("_")[1]
    rotated = json.loads(weft(home, "keys", "rotate", key_id, "--grace", "1h", "-o", "json").stdout)
    assert rotated["id"] == key_id
    assert await principal(home, first)
    assert await principal(home, rotated["key"])
    left = datetime.fromisoformat(rotated["oldExpireTime"]) - datetime.now(UTC)
    assert timedelta(minutes=50) < left <= timedelta(hours=1)

    third = weft(home, "keys", "rotate", key_id, "--grace", "0")
    assert "the old secret is valid until" in third.stdout
    assert [bool(await principal(home, text)) for text in (first, rotated["key"])] == [False, False]
    text = KEY.findall(third.stdout)[0]
    assert await principal(home, text)

    assert weft(home, "keys", "revoke", key_id).stdout == f"key {key_id} revoked\n"
    assert await principal(home, text) is None
    again = weft(home, "keys", "revoke", key_id, "-o", "yaml")
    assert yaml.safe_load(again.stdout) == {"kind": "ApiKey", "id": key_id, "state": "revoked"}
    refused = weft(home, "keys", "rotate", key_id)
    assert (refused.exit_code, refused.stdout) == (3, "")
    assert "no valid key with this id" in refused.stderr
