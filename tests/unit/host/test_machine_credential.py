"""The credential that a machine makes for itself, for each mesh that it joins."""

import re
from pathlib import Path

import pytest

from weft.kernel.errors.error_tree import WeftError
from weft_app.compose.home import WeftHome
from weft_app.compose.join_address import Trust, parse_join_address
from weft_app.compose.machine_credential import credential_in, machine_credential

ADDRESSES = (parse_join_address("https://mesh.example:7443"), parse_join_address("https://192.168.1.5:7443"))


def test_credential_is_kept_in_the_home_and_differs_for_each_mesh_and_machine(tmp_path: Path) -> None:
    home, pinned = WeftHome(tmp_path / "a"), Trust(fingerprint="sha256:" + "0" * 64)
    first = credential_in(home, ADDRESSES, pinned)
    assert re.fullmatch(r"wjm_[0-9a-f]{12}_[0-9a-f]{64}", first)
    assert (home.state / "machine").stat().st_mode & 0o777 == 0o600
    assert (home.state / "machine").read_text() not in first
    assert credential_in(home, ADDRESSES[:1], pinned) == first, "its mesh is known by its certificate"
    by_name = credential_in(home, ADDRESSES, Trust())
    assert credential_in(home, ADDRESSES[::-1], Trust()) == by_name
    others = (
        credential_in(home, ADDRESSES, Trust(fingerprint="sha256:" + "1" * 64)),
        credential_in(home, ADDRESSES[:1], Trust()),
        credential_in(WeftHome(tmp_path / "b"), ADDRESSES, pinned),
    )
    parts = [each.split("_")[1:] for each in (first, by_name, *others)]
    assert len({part for each in parts for part in each}) == 2 * len(parts)


def test_credential_of_a_publisher_follows_from_its_token_and_does_not_contain_it() -> None:
    token = "wjt_3k9x0a7bq2mz_" + "5" * 64
    assert machine_credential(token) == machine_credential(token)
    assert "5" * 64 not in machine_credential(token)


@pytest.mark.parametrize(("content", "mode", "message"), [("", 0o600, "damaged"), ("0" * 64, 0o644, "open to others")])
def test_secret_that_others_may_know_is_refused(tmp_path: Path, content: str, mode: int, message: str) -> None:
    home = WeftHome(tmp_path)
    home.state.mkdir()
    (home.state / "machine").write_text(content)
    (home.state / "machine").chmod(mode)
    with pytest.raises(WeftError, match=message):
        credential_in(home, ADDRESSES, Trust())
