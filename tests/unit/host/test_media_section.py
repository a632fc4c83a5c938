import pytest

from weft.kernel.errors.error_tree import FieldError
from weft_app.compose.service_configs import gateway_config
from weft_app.config.loader import parse_config


def test_file_settings_reach_the_gateway() -> None:
    section = {"allowed_hosts": ["*.Example.org", "a.example.net:8443"], "max_bytes": 2048, "max_audio_seconds": 1.5}
    media = gateway_config(parse_config({"gateway": {"media": section}})).media
    assert media.allowed_hosts == ("*.example.org", "a.example.net:8443")
    assert (media.max_bytes, media.max_audio_seconds) == (2048, 1.5)


@pytest.mark.parametrize(
    "section",
    [
        {"allowed_hosts": ["*"]},
        {"allowed_hosts": ["127.0.0.1"]},
        {"allowed_hosts": ["https://example.org"]},
        {"allowed_hosts": "example.org"},
        {"max_bytes": 0},
        {"max_bytes": 64 * 1024 * 1024},
        {"max_audio_seconds": 0},
        {"max_pixels": 0},
        {"allow_http": True},
    ],
    ids=str,
)
def test_invalid_value_or_name_is_refused(section: dict[str, object]) -> None:
    with pytest.raises(FieldError, match=r"gateway\.media\."):
        parse_config({"gateway": {"media": section}})
