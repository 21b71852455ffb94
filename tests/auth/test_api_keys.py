"""What keys look like, and that what was written is never repeated."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.auth.api_keys import (
    FILE_BYTES_MAX,
    KEY_CHARS_MAX,
    KEYS_MAX,
    Scope,
    digest_of,
    parse_keys,
    parse_setting,
    read_keys_file,
)
from app.config import load_settings
from app.errors import InvalidInput, InvalidSettings

SECRET = "correct-horse-battery-staple"


def test_setting() -> None:
    keys = parse_setting(f" {SECRET}:read, other:with:colons:write ,,short: WRITE")
    assert [key.scope for key in keys] == [Scope.READ, Scope.WRITE, Scope.WRITE]
    assert [key.digest for key in keys] == [
        digest_of(k) for k in (SECRET.encode(), b"other:with:colons", b"short")
    ]
    assert [key.is_short for key in keys] == [False, False, True]
    assert parse_setting("") == ()


def test_bounds_of_a_key_and_of_their_number() -> None:
    longest = "k" * KEY_CHARS_MAX
    (key,) = parse_setting(f"{longest}:read")
    assert key.digest == digest_of(longest.encode())
    with pytest.raises(InvalidInput, match=f"1 to {KEY_CHARS_MAX} characters"):
        parse_setting(f"{longest}k:read")
    entries = [("a line", f"key-{number}:read") for number in range(KEYS_MAX + 1)]
    assert len(parse_keys(entries[:-1])) == KEYS_MAX
    with pytest.raises(InvalidInput, match=f"more than {KEYS_MAX} keys"):
        parse_keys(entries)


def test_a_key_shows_nothing_of_itself() -> None:
    (key,) = parse_setting(f"{SECRET}:read")
    assert repr(key) == "ApiKey(scope=<Scope.READ: 'read'>, is_short=False)"


@pytest.mark.parametrize(
    "text",
    [
        SECRET,
        f"read:{SECRET}",
        f"{SECRET}:admin",
        f"{SECRET}:",
        f"{SECRET} and more:read",
        f"{SECRET}\x07:read",
        f"{SECRET}ü:read",
        f"{SECRET}:read,{SECRET}:write",
        f"{SECRET * 20}:read",
        ":read",
        " , ,",
    ],
)
def test_complaints_name_the_place_and_not_the_key(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match=r"^entry [12] ") as raised:
        parse_setting(text)
    assert SECRET not in str(raised.value)
    for start in ({"api_keys": text}, {}):
        if not start:
            monkeypatch.setenv("KVINDEXER_API_KEYS", text)
        with pytest.raises(InvalidSettings, match=r"entry [12]") as refused:
            load_settings(**start)
        assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    "name", ["KVINDEXER_API_KEYSS", "KVINDEXER_APIKEYS", "kvindexer_apikey", "KVINDEXER_PASSWORD"]
)
def test_misspelt_variable_does_not_give_its_value_away(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, f"{SECRET}:write")
    with pytest.raises(InvalidSettings, match="there is no setting of this name") as raised:
        load_settings()
    assert SECRET not in str(raised.value)


@given(
    st.text(alphabet=st.characters(min_codepoint=33, max_codepoint=126, exclude_characters=","), min_size=8)
)
def test_settings_do_not_show_keys(text: str) -> None:
    key = f"a-key={text}"  # nothing that is in the settings by another right
    settings = load_settings(api_keys=f"{key}:read")
    assert key not in repr(settings.api_keys)
    assert key not in repr(settings.model_dump())
    assert key.encode() not in pickle.dumps(settings.api_keys)
    assert digest_of(key.strip().encode()).hex() not in repr(settings)


def test_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# ours\n\n  {SECRET}:read \nother-key:write\r\n")
    assert [key.scope for key in read_keys_file(path)] == [Scope.READ, Scope.WRITE]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (f"{SECRET}:read\n{SECRET}", "line 2 is not key:read or key:write"),
        ("# nothing but words\n", "there is no key in it"),
        ("", "there is no key in it"),
        (b"\xff\xfe", "not UTF-8"),
        (b"x" * (FILE_BYTES_MAX + 1), "longer than"),
    ],
)
def test_file_that_is_none(tmp_path: Path, content: str | bytes, said: str) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InvalidInput, match=said) as raised:
        read_keys_file(path)
    assert str(path) in str(raised.value)
    assert SECRET not in str(raised.value)


def test_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="No such file"):
        read_keys_file(tmp_path / "nothing")
    with pytest.raises(InvalidInput, match="Is a directory"):
        read_keys_file(tmp_path)
