"""Settings: from where they come, and that a bad one stops the start with its key and value."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.config import Settings, load_settings, variable
from app.errors import InvalidSettings

APP = Path(__file__).parent.parent / "app"


def test_defaults_without_environment() -> None:
    settings = load_settings()
    assert (settings.host, settings.port, settings.ttl_s) == ("127.0.0.1", 8080, 1200.0)
    assert settings.pods == ()


def test_environment_is_read_and_option_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVINDEXER_PORT", "9000")
    monkeypatch.setenv("KVINDEXER_TTL_S", "60")
    settings = load_settings(port=9001)
    assert settings.port == 9001
    assert settings.ttl_s == 60


def test_pods_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVINDEXER_PODS", "a=tcp://h:1,model=m; b=tcp://h:2,model=m;")
    assert load_settings().pods == ("a=tcp://h:1,model=m", "b=tcp://h:2,model=m")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KVINDEXER_PORT", "70000"),
        ("KVINDEXER_PORT", "http"),
        ("KVINDEXER_TTL_S", "-1"),
        ("KVINDEXER_TTL_S", "nan"),
        ("KVINDEXER_TTL_S", "inf"),
        ("KVINDEXER_COUNT_COPIES", "perhaps"),
        ("KVINDEXER_LOG_LEVEL", "loud"),
        ("KVINDEXER_BODY_BYTES_MAX", "0"),
        ("KVINDEXER_BODY_BYTES_MAX", ""),
    ],
)
def test_impossible_value_names_key_and_value(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidSettings) as caught:
        load_settings()
    assert f"{name}={value!r}" in str(caught.value)


@pytest.mark.parametrize("name", ["KVINDEXER_PROT", "kvindexer_prot", "KVINDEXER_"])
def test_unknown_variable_stops(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(InvalidSettings) as caught:
        load_settings()
    assert f"{name}='1'" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("KVINDEXER_TTL", "is KVINDEXER_TTL_S meant?"),
        ("KVINDEXER_REDIS_URI", "is KVINDEXER_REDIS_URL meant?"),
        ("kvindexer_log_fromat", "is KVINDEXER_LOG_FORMAT meant?"),
        ("KVINDEXER_SERVICE_HOST", "set enableServiceLinks to false in the pod"),
        ("KVINDEXER_PORT_8080_TCP_ADDR", "set enableServiceLinks to false in the pod"),
        ("KVINDEXER_QQQQ", "there is no setting of this name"),
    ],
)
def test_unknown_variable_says_what_may_be_meant(
    monkeypatch: pytest.MonkeyPatch, name: str, meant: str
) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(InvalidSettings) as caught:
        load_settings()
    assert str(caught.value).endswith(meant)


@pytest.mark.parametrize("value", ["", " "])
@pytest.mark.parametrize("name", ["redis_url", "snapshot_path", "tls_certificate", "replica_id", "api_keys"])
def test_empty_is_not_none(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """A secret that is empty by mistake must not start a lone process, or one that is open to everybody."""
    monkeypatch.setenv(variable(name), value)
    with pytest.raises(InvalidSettings, match=rf"{variable(name)}=.*: it is empty: leave it out"):
        load_settings()


def test_bad_option_is_named_as_an_option() -> None:
    with pytest.raises(InvalidSettings, match="--sweep-interval-s=0"):
        load_settings(sweep_interval_s=0)


def test_all_faults_are_named_at_once() -> None:
    with pytest.raises(InvalidSettings, match=r"--port=-1.*--keep-alive-s=0"):
        load_settings(port=-1, keep_alive_s=0)


def test_every_setting_has_a_sentence() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, name
        assert field.description.endswith("."), name


def test_every_setting_is_used() -> None:
    """A setting that nothing reads is a promise that nothing keeps."""
    code = "".join(path.read_text() for path in APP.rglob("*.py") if path.name not in ("config.py", "cli.py"))
    unused = [name for name in Settings.model_fields if f"settings.{name}" not in code]
    assert not unused


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_settings().port = 1  # type: ignore[misc]


def test_variable_names() -> None:
    assert variable("ttl_s") == "KVINDEXER_TTL_S"


def test_several_workers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEB_CONCURRENCY", "2")
    with pytest.raises(InvalidSettings, match=r"WEB_CONCURRENCY='2'.*replicas"):
        load_settings()
    monkeypatch.setenv("WEB_CONCURRENCY", "1")
    assert load_settings() == Settings()
