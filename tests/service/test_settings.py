"""Settings as the environment gives them."""

import pytest
from pydantic import SecretStr, ValidationError

from service.settings import Settings


@pytest.mark.parametrize("given", ["secret\n", " secret", SecretStr("secret\n")])
def test_a_token_from_a_file_made_by_echo_is_the_token_without_its_newline(given):
    token = Settings(api_token=given).api_token
    assert token is not None and token.get_secret_value() == "secret"


@pytest.mark.parametrize("name", ["SLOTLINE_API_TOKEN", "RAY_AUTH_TOKEN"])
@pytest.mark.parametrize("blank", [" ", "\n", "\t "])
def test_a_blank_token_is_refused_for_it_would_keep_nobody_out(monkeypatch, name, blank):
    monkeypatch.setenv(name, blank)
    with pytest.raises(ValidationError, match="a blank token keeps nobody out"):
        Settings()


def test_a_blank_token_does_not_open_the_server_to_others(monkeypatch):
    monkeypatch.setenv("SLOTLINE_API_TOKEN", " ")
    monkeypatch.setenv("SLOTLINE_HOST", "0.0.0.0")
    with pytest.raises(ValidationError):
        Settings()


def test_an_empty_variable_is_none_at_all(monkeypatch):
    monkeypatch.setenv("SLOTLINE_API_TOKEN", "")
    assert Settings().api_token is None
