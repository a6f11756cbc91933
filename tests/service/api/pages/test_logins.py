"""A browser without a login: it is led to the identity provider, comes back, stays, renews its session, and logs out."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.api.sso import sso_of
from service.settings.settings import Settings
from tests.polling import until
from tests.service.api.identity_provider import CodeProvider, code_provider
from tests.service.api.test_oidc import AUDIENCE, ROLES
from tests.service.serving import Served, serve


@pytest.fixture
def provider() -> Iterator[CodeProvider]:
    with code_provider() as provider:
        yield provider


@pytest.fixture
def site(provider: CodeProvider, tmp_path: Path) -> Iterator[Served]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    provider.redirect_uri = f"{url}/login/callback"
    settings = Settings(
        data_dir=tmp_path / "data",
        public_url=url,
        oidc_issuer=provider.url,
        oidc_audience=AUDIENCE,
        oidc_roles=ROLES,
    )
    with serve(settings, port=port) as served:
        yield served


def test_a_visitor_logs_in_stays_on_the_page_and_logs_out(
    site: Served, provider: CodeProvider, page, tmp_path: Path
):
    page.open(f"{site.url}/?state=QUEUED#jobs")
    assert page.js("location.href") == f"{site.url}/?state=QUEUED#jobs"
    assert page.js("document.querySelector('.account span').textContent") == "ana"
    assert page.js("document.cookie") == "", "no script reads the session"
    page.screenshot(tmp_path / "logged-in.png")
    asked = provider.seen.count("/authorize")

    sso_of(site.app)._now = lambda: time.time() + 601
    provider.claims = {"exp": int(time.time()) + 3600}
    page.js("window.sameDocument = true")
    until(lambda: page.js("fetch('/api/v1/whoami').then(answer => answer.ok)"), "the page renews its session")
    assert page.js("window.sameDocument") and provider.seen.count("/authorize") == asked, (
        "by its refresh token"
    )

    sso_of(site.app)._now = lambda: time.time() + 3601
    provider.claims, provider.gives_refresh_tokens = {"exp": int(time.time()) + 7200}, False
    provider.refresh_tokens.clear()
    page.wait("!window.sameDocument && document.body?.dataset.ready === 'true'")
    assert provider.seen.count("/authorize") > asked, "over the provider"
    assert page.js("location.href") == f"{site.url}/?state=QUEUED#jobs", "and back to the same place"

    page.errors.clear()
    page.click(".account button")
    page.wait("location.pathname === '/logout' && document.body?.dataset.ready === 'true'")
    page.screenshot(tmp_path / "logged-out.png")
    assert "logged out of Slotline" in page.js("document.querySelector('main').textContent")
    assert page.js("fetch('/api/v1/whoami').then(answer => answer.status)") == 401
    assert page.errors == [error for error in page.errors if "401" in error], page.errors


def test_a_long_name_fits_into_the_window_of_a_phone(
    site: Served, provider: CodeProvider, page, tmp_path: Path
):
    provider.claims = {"sub": "somebody.with-a-very-long-name@department.of.a.large.organisation.example"}
    page.open(f"{site.url}/cluster", width=400, height=800)
    page.screenshot(tmp_path / "narrow.png")
    assert page.js("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    right = page.js("document.querySelector('.account button').getBoundingClientRect().right")
    assert right <= 400


def test_a_tab_is_not_logged_in_again_after_a_logout_in_another(
    site: Served, provider: CodeProvider, page, tmp_path: Path
):
    page.open(f"{site.url}/cluster")
    asked = provider.seen.count("/authorize")
    page.call("Network.clearBrowserCookies")  # as the answer to the other tab's POST /logout does
    page.wait("location.pathname === '/logout'")
    assert provider.seen.count("/authorize") == asked == 1


def test_while_the_provider_is_away_a_page_says_so_and_stays(
    site: Served, provider: CodeProvider, page, tmp_path: Path
):
    page.open(f"{site.url}/cluster")
    sso_of(site.app)._now = lambda: time.time() + 601
    provider.is_away = True
    page.wait("document.getElementById('connection').textContent.includes('provider does not answer')")
    provider.is_away, provider.claims = False, {"exp": int(time.time()) + 3600}
    page.wait("document.getElementById('connection').textContent === ''")
    assert page.js("location.pathname") == "/cluster" and provider.seen.count("/authorize") == 1
