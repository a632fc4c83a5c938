"""What is refused of certificates and keys before anybody relies on them, and when changes are seen."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from weft.kernel.channels.tls import (
    MAX_FILE_BYTES,
    RETRY_SECONDS,
    ServerTls,
    TlsFiles,
    TlsMaterial,
    TlsSource,
    read_material,
)
from weft.kernel.errors.error_tree import FieldError
from weft_testing.certificates import Authority


@pytest.fixture
def ca() -> Authority:
    return Authority()


def refusal(files: TlsFiles) -> tuple[str, str]:
    with pytest.raises(FieldError) as refused:
        read_material(files)
    return refused.value.field, refused.value.message.partition(": ")[2]


def test_valid_files_are_read_and_a_key_is_not_shown(ca: Authority, tmp_path: Path) -> None:
    pair = ca.issue("host")
    material = read_material(pair.write(tmp_path, ca))
    assert (material.certificate, material.key, material.roots) == (pair.certificate, pair.key, ca.root)
    assert "PRIVATE KEY" not in repr(material)


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o602, 0o620, 0o660, 0o601])
def test_key_readable_by_others_or_writable_by_its_group_is_refused(ca: Authority, tmp_path: Path, mode: int) -> None:
    files = ca.issue("host").write(tmp_path)
    assert files.key_file is not None
    files.key_file.chmod(mode)
    field, why = refusal(files)
    assert field == "tls.key_file"
    assert f"{mode:04o}" in why
    assert "chmod 600" in why


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o440, 0o640])
def test_owner_key_at_most_readable_by_its_group_is_accepted(ca: Authority, tmp_path: Path, mode: int) -> None:
    files = ca.issue("host").write(tmp_path)
    assert files.key_file is not None
    files.key_file.chmod(mode)
    assert read_material(files).key


@pytest.mark.parametrize(
    ("begins", "ends", "why"),
    [
        (timedelta(days=-2), timedelta(seconds=-1), "certificate has expired"),
        (timedelta(days=1), timedelta(days=2), "certificate is not valid yet"),
    ],
)
def test_certificate_outside_its_validity_period_is_refused(
    ca: Authority, tmp_path: Path, begins: timedelta, ends: timedelta, why: str
) -> None:
    files = ca.issue("host", begins=begins, ends=ends).write(tmp_path)
    assert refusal(files) == ("tls.certificate_file", why)


def test_start_uses_an_expired_certificate_and_a_running_process_takes_no_new_one(
    ca: Authority, tmp_path: Path
) -> None:
    expired = ca.issue_expired("host")
    source = TlsSource(expired.write(tmp_path))
    assert source.current()[1].certificate == expired.certificate
    valid = ca.issue("host")
    valid.write(tmp_path)
    assert source.current()[1].certificate == valid.certificate
    ca.issue_expired("host").write(tmp_path)
    assert source.current()[1].certificate == valid.certificate


def test_certificate_without_its_key_or_a_key_without_its_certificate_is_refused(ca: Authority, tmp_path: Path) -> None:
    files = ca.issue("host").write(tmp_path)
    assert refusal(TlsFiles(certificate_file=files.certificate_file))[0] == "tls.key_file"
    assert refusal(TlsFiles(key_file=files.key_file, section="gateway.tls"))[0] == "gateway.tls.certificate_file"


def test_key_of_another_certificate_is_refused(ca: Authority, tmp_path: Path) -> None:
    files, other = ca.issue("host").write(tmp_path), ca.issue("host").write(tmp_path, name="other")
    field, why = refusal(TlsFiles(certificate_file=files.certificate_file, key_file=other.key_file))
    assert (field, "are not a PEM chain and its key" in why) == ("tls.certificate_file", True)


def test_key_with_a_passphrase_is_refused_without_a_prompt(ca: Authority, tmp_path: Path) -> None:
    files = ca.issue("host").write(tmp_path)
    assert files.key_file is not None
    key = load_pem_private_key(files.key_file.read_bytes(), None)
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    files.key_file.write_bytes(locked)
    field, why = refusal(files)
    assert (field, "without a passphrase" in why) == ("tls.certificate_file", True)


def ca_of(content: bytes) -> Callable[[Path], TlsFiles]:
    def make(folder: Path) -> TlsFiles:
        (folder / "ca.pem").write_bytes(content)
        return TlsFiles(ca_file=folder / "ca.pem")

    return make


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda folder: TlsFiles(ca_file=folder / "none.pem"), "cannot be read: No such file"),
        (ca_of(b""), "holds no PEM certificates"),
        (ca_of(b"\xff\xfe"), "holds no PEM certificates"),
        (ca_of(b"#" * (MAX_FILE_BYTES + 1)), f"has more than {MAX_FILE_BYTES} bytes"),
    ],
)
def test_invalid_roots_are_refused_without_showing_their_path(
    tmp_path: Path, make: Callable[[Path], TlsFiles], why: str
) -> None:
    field, words = refusal(make(tmp_path))
    assert field == "tls.ca_file"
    assert words.startswith(why)
    assert str(tmp_path) not in words


def test_required_client_certificates_need_roots(ca: Authority, tmp_path: Path) -> None:
    tls = ServerTls(files=ca.issue("host").write(tmp_path), requires_clients=True)
    with pytest.raises(FieldError, match=r"tls\.ca_file"):
        tls.credentials()


def test_changes_are_detected_after_the_interval_and_not_before(ca: Authority, tmp_path: Path) -> None:
    now = 100.0
    first, second = ca.issue("host"), ca.issue("host")
    source = TlsSource(first.write(tmp_path), interval_seconds=5.0, monotonic=lambda: now)
    second.write(tmp_path)
    now = 104.9
    assert source.current() == (1, source.current()[1])
    assert source.current()[1].certificate == first.certificate
    now = 105.0
    version, material = source.current()
    assert (version, material.certificate) == (2, second.certificate)


def test_certificate_replaced_before_its_key_takes_effect_with_the_key(ca: Authority, tmp_path: Path) -> None:
    first, second = ca.issue("host"), ca.issue("host")
    source = TlsSource(first.write(tmp_path))
    (tmp_path / "own.pem").write_bytes(second.certificate)
    assert source.current()[1].certificate == first.certificate
    (tmp_path / "own.key").write_bytes(second.key)
    version, material = source.current()
    assert (version, material.certificate, material.key) == (2, second.certificate, second.key)


def test_key_takes_effect_once_its_mode_is_corrected(ca: Authority, tmp_path: Path) -> None:
    """The log asked for chmod 600, which had no effect until the files were written again."""
    now = 100.0
    first, second = ca.issue("host"), ca.issue("host")
    source = TlsSource(first.write(tmp_path), monotonic=lambda: now)
    files = second.write(tmp_path)
    assert files.key_file is not None
    files.key_file.chmod(0o644)
    assert source.current()[1].certificate == first.certificate
    files.key_file.chmod(0o600)
    now += RETRY_SECONDS
    version, material = source.current()
    assert (version, material.certificate) == (2, second.certificate)


def test_unusable_files_are_logged_once_and_read_once_a_second(
    ca: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now, reads = 100.0, list[TlsFiles]()

    def count(files: TlsFiles) -> TlsMaterial:
        reads.append(files)
        return read_material(files)

    source = TlsSource(ca.issue("host").write(tmp_path), monotonic=lambda: now)
    monkeypatch.setattr("weft.kernel.channels.tls.read_material", count)
    ca.issue("host", begins=timedelta(hours=1)).write(tmp_path)
    for _ in range(20):
        source.current()
        now += RETRY_SECONDS / 4
    assert len(reads) == 5
    assert capsys.readouterr().out.count("is not valid yet") == 1


def test_files_that_change_during_a_read_are_read_again(
    ca: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = ca.issue("host"), ca.issue("host"), ca.issue("host")
    source = TlsSource(first.write(tmp_path))
    later = [third]

    def read_slowly(files: TlsFiles) -> TlsMaterial:
        material = read_material(files)
        while later:
            later.pop().write(tmp_path)
        return material

    monkeypatch.setattr("weft.kernel.channels.tls.read_material", read_slowly)
    second.write(tmp_path)
    version, material = source.current()
    assert (version, material.certificate) == (2, third.certificate)


def test_files_rewritten_with_the_same_content_are_not_a_change(ca: Authority, tmp_path: Path) -> None:
    pair = ca.issue("host")
    source = TlsSource(pair.write(tmp_path))
    pair.write(tmp_path)
    assert source.current()[0] == 1


def test_removed_files_keep_the_old_content_in_use(ca: Authority, tmp_path: Path) -> None:
    pair = ca.issue("host")
    source = TlsSource(pair.write(tmp_path))
    (tmp_path / "own.key").unlink()
    assert source.current()[1].certificate == pair.certificate
