"""Settings as the environment gives them."""

import fsspec
import pytest
from pydantic import SecretStr, ValidationError

from service.settings.settings import RETIRED_SETTINGS, Settings


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


@pytest.mark.parametrize("ports", ["9499-9400", "0-5", "9400-65536", "9400", "a-b"])
def test_ports_that_are_no_range_are_refused(ports):
    with pytest.raises(ValidationError, match="metrics_ports"):
        Settings(metrics_ports=ports)


@pytest.mark.parametrize("place", ["folder", "http://host/code", "https://host/code", "nowhere://x"])
def test_code_lies_in_a_bucket_or_at_an_absolute_path(place):
    with pytest.raises(ValidationError, match="packages_uri"):
        Settings(packages_uri=place)
    for good in ("/shared/code", "file:///shared/code"):
        assert Settings(packages_uri=good).packages_uri == good


def test_a_bucket_needs_its_library(monkeypatch):
    libraries = ["s3"]

    def find(scheme: str) -> None:
        if scheme not in libraries:
            raise ImportError(f"Install a library for {scheme}")

    monkeypatch.setattr(fsspec, "get_filesystem_class", find)
    assert Settings(packages_uri="s3://bucket/code").packages_uri == "s3://bucket/code"
    with pytest.raises(ValidationError, match=r"library for gs: install slotline\[storage\]"):
        Settings(packages_uri="gs://bucket/code")


def test_drivers_use_the_users_address_unless_they_have_one_of_their_own():
    assert Settings(public_url="https://out").control_url == "https://out"
    both = Settings(public_url="https://out", driver_url="http://in:80/")
    assert (both.url, both.control_url) == ("https://out", "http://in:80")
    with pytest.raises(ValidationError, match="http"):
        Settings(driver_url="in:80")


def test_a_name_that_is_retired_is_no_setting():
    assert not {f"SLOTLINE_{name.upper()}" for name in Settings.model_fields} & {*RETIRED_SETTINGS}
