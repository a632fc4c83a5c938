"""The file that every digest is made with: made once, read by its owner alone, never silently replaced."""

import os
from pathlib import Path

import pytest
from key_stage import PEPPER_NAME, registry_with_keys
from kit.refusals import refused

from registry_svc.config import KeysConfig
from registry_svc.keys.api_keys import PEPPER_BYTES, make_pepper
from weft.kernel.errors import FieldError
from weft_testing.fake_clock import FakeClock

FIELD = "registry.keys.pepper_file"


async def refuses_to_start(folder: Path) -> str:
    with pytest.raises(FieldError) as refusal:
        async with registry_with_keys(folder):
            pass
    assert refusal.value.field == FIELD
    return refusal.value.message


def names_in(folder: Path, part: str) -> list[str]:
    return [path.name for path in folder.iterdir() if part in path.name]


async def test_first_start_creates_the_pepper_for_its_owner_only_and_the_next_reuses_it(tmp_path: Path) -> None:
    path = tmp_path / PEPPER_NAME
    earlier = os.umask(0)
    try:
        async with registry_with_keys(tmp_path):
            pepper = path.read_bytes()
            assert len(pepper) == PEPPER_BYTES
            assert path.stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(earlier)
    async with registry_with_keys(tmp_path) as stage:
        assert path.read_bytes() == pepper == (await stage.ring()).pepper
    assert names_in(tmp_path, PEPPER_NAME) == [PEPPER_NAME], "no half-made one"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666, 0o610, 0o602])
async def test_registry_does_not_start_if_others_can_access_the_pepper(tmp_path: Path, mode: int) -> None:
    path = tmp_path / PEPPER_NAME
    make_pepper(path)
    path.chmod(mode)
    message = await refuses_to_start(tmp_path)
    assert f"chmod 600 {path}" in message
    path.chmod(0o400)
    async with registry_with_keys(tmp_path) as stage:
        await stage.create()


@pytest.mark.parametrize("length", [0, 1, PEPPER_BYTES - 1, PEPPER_BYTES + 1, 65_536])
async def test_registry_does_not_start_with_a_pepper_of_wrong_length(tmp_path: Path, length: int) -> None:
    path = tmp_path / PEPPER_NAME
    path.touch(0o600)
    path.write_bytes(b"x" * length)
    assert "32 bytes" in await refuses_to_start(tmp_path)
    assert path.stat().st_size == length, "it is left as it was"


async def test_registry_does_not_start_if_the_pepper_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / PEPPER_NAME).mkdir()
    assert "cannot be read" in await refuses_to_start(tmp_path)


@pytest.mark.parametrize("another", [False, True])
async def test_lost_pepper_is_reported_and_never_replaced_while_keys_exist(tmp_path: Path, another: bool) -> None:
    path, clock = tmp_path / PEPPER_NAME, FakeClock()
    async with registry_with_keys(tmp_path, clock=clock) as stage:
        _, text = await stage.create()
    saved = path.read_bytes()
    path.unlink()
    if another:
        make_pepper(path)
    left = path.read_bytes() if another else None
    message = await refuses_to_start(tmp_path)
    assert "backup" in message
    assert "revoke_all_if_pepper_lost" in message
    assert (path.read_bytes() if path.exists() else None) == left
    path.touch(0o600)
    path.write_bytes(saved)
    async with registry_with_keys(tmp_path, clock=clock) as stage:
        assert await stage.is_good(text), "restored, everything is as it was"


async def test_operator_can_revoke_all_keys_for_a_lost_pepper(tmp_path: Path) -> None:
    path, clock = tmp_path / PEPPER_NAME, FakeClock()
    async with registry_with_keys(tmp_path, clock=clock) as stage:
        key_id, text = await stage.create()
    path.unlink()
    giving_up = KeysConfig(pepper_file=path, revoke_all_if_pepper_lost=True)
    for _ in range(2):
        async with registry_with_keys(tmp_path, clock=clock, config=giving_up) as stage:
            listed = {key.id: key.HasField("revoke_time") for key in await stage.listed()}
            assert listed.pop(key_id)
            assert not any(listed.values()), "keys that were made since stay"
            assert not await stage.is_good(text)
            _, fresh = await stage.create()
            assert await stage.is_good(fresh)


async def test_lost_pepper_is_replaced_if_no_key_is_valid(tmp_path: Path) -> None:
    path = tmp_path / PEPPER_NAME
    async with registry_with_keys(tmp_path) as stage:
        key_id, _ = await stage.create()
        await stage.revoke(key_id)
    path.unlink()
    async with registry_with_keys(tmp_path) as stage:
        _, text = await stage.create()
        assert await stage.is_good(text)
        assert len(await stage.listed()) == 2


def test_unwritable_pepper_is_reported_with_its_field(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with refused(field=FIELD):
        make_pepper(tmp_path / "file" / PEPPER_NAME)
