"""What `weft doctor` says of a configuration, of attached servers and of accelerators."""

import inspect
import json
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from weft.kernel.errors.error_tree import WeftError
from weft_app.cli.doctor import by_end, doctor, examine
from weft_app.cli.doctor_checks import Finding, Verdict
from weft_app.cli.network_options import NetworkOptions, TlsChoice
from weft_app.cli.up import up
from weft_app.compose.home import WeftHome
from weft_app.compose.startable import require_startable
from weft_app.config.loader import load_config
from weft_testing.free_port import free_port


def _findings(folder: Path, configuration: str) -> dict[str, Finding]:
    path = folder / "weft.yaml"
    path.write_text(configuration, encoding="utf-8")
    return {finding.check: finding for finding in examine(WeftHome(folder / "home"), path, NetworkOptions(port=0))}


def test_killed_mesh_is_not_said_to_run(tmp_path: Path) -> None:
    """Its file was taken for a mesh, and ports that another program had taken since for those of this mesh."""
    home = WeftHome(tmp_path)
    home.create()

    def said() -> str:
        found = examine(home, None, NetworkOptions(port=0))
        return next(finding.detail for finding in found if finding.check == "home")

    with home.claim():
        home.announce({"state": "running", "url": "http://127.0.0.1:8080", "pids": {"host": 7}})
        assert "a mesh runs here (pid 7, http://127.0.0.1:8080)" in said()
        left = home.up_file.read_bytes()
    home.up_file.write_bytes(left)
    assert "a mesh" not in said()


@contextmanager
def _server(status: int, *names: str, owner: str = "library") -> Iterator[str]:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"data": [{"id": name, "owned_by": owner} for name in names]}).encode()
            self.send_response(status if self.path == "/v1/models" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    serving = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        serving.join()


def _attached(url: str, more: str = "") -> str:
    return f"runners: [{{name: box, runtime: openai_http, models: [{{name: llama, url: '{url}'{more}}}]}}]"


@pytest.mark.parametrize(
    "configuration",
    [
        "{host: 0.0.0.0, auth: {required: false}}",
        "{host: 0.0.0.0, gateway: {tls: {self_signed: false}}}",
        "{host: 0.0.0.0, gateway: {insecure: true, tls: {self_signed: true}}}",
        "host: nowhere.invalid",
        "{host: 0.0.0.0, auth: {required: false}, gateway: {tls_terminated_elsewhere: true}}",
        "gateway: {tls: {certificate_file: /nowhere/cert.pem, key_file: /nowhere/key.pem}}",
    ],
)
def test_doctor_reports_start_errors_with_the_same_text_and_file(tmp_path: Path, configuration: str) -> None:
    """`host: 0.0.0.0` passed the doctor, and `weft up` refused it."""
    finding = _findings(tmp_path, configuration)["configuration"]
    path = tmp_path / "weft.yaml"
    with pytest.raises(WeftError) as refused:
        require_startable(load_config(path), WeftHome(tmp_path / "home"))
    assert (finding.verdict, finding.detail) == (Verdict.FAILED, f"{path}: {refused.value.message}")


def test_files_in_use_are_listed_even_if_none_is_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def detail() -> str:
        found = examine(WeftHome(tmp_path / "home"), None, NetworkOptions(port=0))
        return next(finding.detail for finding in found if finding.check == "configuration")

    monkeypatch.chdir(tmp_path)
    assert detail() == "defaults (there is no ./weft.yaml)"
    (tmp_path / "weft.yaml").write_text("port: 9000", encoding="utf-8")
    assert detail() == "weft.yaml"
    (tmp_path / "weft.local.yaml").write_text("port: 9001", encoding="utf-8")
    assert detail() == "weft.yaml, weft.local.yaml"


def test_each_attached_server_is_checked_and_its_models_are_listed(tmp_path: Path) -> None:
    with _server(200, "llama3.2:3b", "qwen3:8b") as url:
        missing = _findings(tmp_path, _attached(url))["server"]
        there = _findings(tmp_path, _attached(url, ", upstream_model: 'llama3.2:3b'"))["server"]
    assert (missing.verdict, missing.remedy) == (Verdict.WARNING, "set upstream_model")
    assert "the server has no model llama; it has llama3.2:3b, qwen3:8b" in missing.detail
    assert (there.verdict, there.detail) == (Verdict.OK, "llama: its server responds and has the model")


def test_weft_mesh_behind_a_url_needs_explicitly_named_models(tmp_path: Path) -> None:
    with _server(200, "qwen", owner="weft") as url:
        finding = _findings(tmp_path, f"runners: [{{name: box, url: '{url}'}}]")["server"]
    assert (finding.verdict, finding.detail) == (
        Verdict.WARNING,
        "box: it is a weft mesh; list its models one by one",
    )
    assert finding.remedy == "list them beside its url, such as models: [{name: qwen}]"


@pytest.mark.parametrize(("status", "verdict"), [(404, Verdict.OK), (401, Verdict.FAILED), (500, Verdict.FAILED)])
def test_server_without_a_model_list_passes_and_one_that_refuses_fails(
    tmp_path: Path, status: int, verdict: Verdict
) -> None:
    with _server(status) as url:
        assert _findings(tmp_path, _attached(url))["server"].verdict is verdict


def test_unresponsive_server_is_reported_without_the_user_in_its_address(tmp_path: Path) -> None:
    port = free_port()
    finding = _findings(tmp_path, _attached(f"http://127.0.0.1:{port}"))["server"]
    assert finding.verdict is Verdict.FAILED
    assert f"llama: http://127.0.0.1:{port} does not answer: Connection refused" in finding.detail


def test_reason_why_a_server_does_not_answer_was_lost(tmp_path: Path) -> None:
    finding = _findings(tmp_path, _attached("http://nowhere.invalid:8000"))["server"]
    assert "llama: http://nowhere.invalid:8000 does not answer: its name is not known" in finding.detail


def test_accelerators_have_a_line(tmp_path: Path) -> None:
    assert _findings(tmp_path, "port: 9000")["accelerators"].detail


def _program(model: str) -> str:
    return f"runners: [{{name: box, runtime: server, models: [{{name: m, model: x, {model}}}]}}]"


def test_missing_program_is_reported_with_its_install_page(tmp_path: Path) -> None:
    found = _findings(tmp_path, _program("preset: tgi"))["program"]
    assert (found.verdict, found.detail) == (Verdict.FAILED, "m: there is no program text-generation-launcher")
    assert found.remedy == "https://huggingface.co/docs/text-generation-inference/installation"


def test_module_missing_from_an_interpreter_is_reported(tmp_path: Path) -> None:
    """`python3 -m sglang.launch_server`: there is a python3 nearly everywhere."""
    command = f"command: ['{sys.executable}', -m, sglang.launch_server, '{{port}}']"
    found = _findings(tmp_path, _program(f"preset: sglang, {command}"))["program"]
    assert (found.verdict, found.detail) == (Verdict.FAILED, f"m: {sys.executable} has no module sglang")
    assert found.remedy == "pip install sglang"


@pytest.mark.parametrize("words", ["-m, http.server", "main.py"])
def test_installed_program_is_a_finding_without_a_remedy(tmp_path: Path, words: str) -> None:
    found = _findings(tmp_path, _program(f"command: ['{sys.executable}', {words}, '{{port}}']"))["program"]
    assert (found.verdict, found.detail, found.remedy) == (Verdict.OK, "m: its program is installed", "")


def test_missing_unknown_program_suggests_correcting_the_configuration(tmp_path: Path) -> None:
    found = _findings(tmp_path, _program("command: [no-such-program, '{port}']"))["program"]
    assert (found.verdict, found.remedy) == (Verdict.FAILED, "install it, or correct `command`")


def test_up_options_are_validated_as_up_does(tmp_path: Path) -> None:
    """`weft doctor` had `--host` and `--port` alone."""
    network = NetworkOptions(host="0.0.0.0", port=0, grpc_port=1, insecure=True, tls=TlsChoice.AUTO)
    found = {each.check: each for each in examine(WeftHome(tmp_path / "home"), None, network)}
    assert found["configuration"].verdict is Verdict.FAILED
    assert "insecure" in found["configuration"].detail
    assert found["configuration"].remedy == "leave one of them out"


def test_doctor_has_every_network_option_of_up() -> None:
    given = {each.name for each in fields(NetworkOptions)}
    assert given <= inspect.signature(doctor).parameters.keys() & inspect.signature(up).parameters.keys()


def test_slow_check_is_shown_after_the_others_when_it_ends() -> None:
    """An unresponsive server kept the lines of all later checks from a terminal."""
    slow, first, second = (Future[list[Finding]]() for _ in range(3))
    second.set_result([])
    first.set_result([])
    shown = by_end([slow, first, second], seconds=0)
    assert [next(shown), next(shown)] == [first, second]
    slow.set_result([])
    assert list(shown) == [slow]
