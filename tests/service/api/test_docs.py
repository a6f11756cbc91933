"""/docs names every route and value, and loads nothing from anywhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from tests.service.api.conftest import ApiMaker


class Tags(HTMLParser):
    """Tags and where they point to."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.links: set[str] = set()
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        given = dict(attrs)
        assert not any(name.startswith("on") for name in given), "no script in an attribute"
        self.links |= {str(given[name]) for name in ("src", "href") if name in given}
        self.ids |= {str(given["id"])} if "id" in given else set()


async def test_the_documentation_needs_no_script_and_nothing_from_elsewhere(make_api: ApiMaker):
    async with make_api(require_token=True) as api:
        page = await api.client.get("/docs")
        document = (await api.client.get("/openapi.json")).json()
        assert (await api.client.get("/redoc")).status_code == 404
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert "script" not in page.headers["content-security-policy"]
    tags = Tags()
    tags.feed(page.text)
    assert not tags.names & {"script", "link", "img", "iframe"}
    assert tags.links <= {"/openapi.json", *(f"#{name}" for name in tags.ids)}, (
        "every link leads somewhere here"
    )
    assert not re.search(r"https?://", page.text)
    for path, operations in document["paths"].items():
        for method in operations:
            assert f"{method.upper()}</span> <code>{path}</code>" in page.text
    assert tags.ids == set(document["components"]["schemas"])
