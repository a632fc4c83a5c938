"""weft.yaml takes the spelling of documents as well: contextTokens for context_tokens."""

from pathlib import Path

import pytest

from weft.kernel.errors.error_tree import FieldError
from weft_app.config.loader import effective_values, load_config, load_with_sources

FILE = """
grpcPort: 7070
gateway:
  allowedHosts: [mesh.lan]
router:
  queueTimeoutSeconds: 5
  pools:
    maxInFlight: {maxInFlight: 7}
runners:
  - name: box
    probeIntervalSeconds: 2
    models:
      - name: qwen
        url: http://127.0.0.1:11434
        upstreamModel: qwen3:8b
        defaultParams: {max_tokens: 7, topK: 3}
"""


def written(folder: Path, text: str, name: str = "weft.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_settings_of_every_section_accept_both_spellings(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, FILE))
    assert config.grpc_port == 7070
    assert tuple(config.gateway.allowed_hosts) == ("mesh.lan",)
    assert config.router.queue_timeout_seconds == 5
    (runner,) = config.runners or ()
    assert (runner.runtime, runner.probe_interval_seconds) == ("openai_http", 2)
    assert getattr(runner.models[0], "upstream_model", "") == "qwen3:8b"


def test_name_keys_and_request_parameters_are_unchanged(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, FILE))
    assert {name: pool.max_in_flight for name, pool in config.router.pools.items()} == {"maxInFlight": 7}
    (runner,) = config.runners or ()
    assert dict(runner.models[0].default_params) == {"max_tokens": 7, "topK": 3}


def test_local_file_is_merged_in_either_spelling(tmp_path: Path) -> None:
    path = written(tmp_path, "grpc_port: 7070\n")
    written(tmp_path, "grpcPort: 7071\n", "weft.local.yaml")
    assert load_config(path).grpc_port == 7071


def test_value_keeps_its_line_and_is_shown_under_the_setting_name(tmp_path: Path) -> None:
    loaded = load_with_sources(written(tmp_path, FILE))
    (found,) = (each for each in effective_values(loaded) if each.name == "grpc_port")
    assert (found.value, found.source) == (7070, "weft.yaml line 2")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("grpcPort: lots\n", "grpc_port: must be a whole number, and is the text"),
        ("grpcPrt: 1\n", "grpcPrt: is not a setting; did you mean grpc_port?"),
        ("gateway: {allowedHost: [a]}\n", "gateway.allowedHost: is not a setting; did you mean allowed_hosts?"),
        ("grpc_port: 1\ngrpcPort: 2\n", "grpcPort: is not a setting; did you mean grpc_port?"),
    ],
)
def test_mistake_is_reported_with_its_line_and_the_closest_setting(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(FieldError) as refused:
        load_config(written(tmp_path, text))
    assert said in refused.value.message
    assert "weft.yaml line" in refused.value.message
