"""What a driver says, with its job's secrets blanked out."""

from __future__ import annotations

import io
import json

import httpx
from hypothesis import given
from hypothesis import strategies as st

from worker.contract.logs import MaskedStream, SecretMask
from worker.driver.control_plane_client import ControlPlaneClient

KEY = "-----BEGIN KEY-----\nabcdefghijkl\nxyz\n-----END KEY-----\n"


def masked(*values: str) -> SecretMask:
    mask = SecretMask()
    mask.hide(values)
    return mask


def test_values_are_blanked_whole_and_line_by_line():
    mask = masked("hunter2-and", "hunter2-and-more", KEY)
    assert mask.text("a hunter2-and-more b hunter2-and c") == "a *** b *** c"
    assert "abcdefghijkl" not in mask.text(repr(KEY)) and "abcdefghijkl" not in mask.text(KEY)
    assert mask.text("xyz stays: it is too short to be found") == "xyz stays: it is too short to be found"
    assert SecretMask().text("hunter2-and") == "hunter2-and"
    assert masked("a.c+e[g]i").text("abccegi a.c+e[g]i") == "abccegi ***"


UNBLANKED = st.characters(exclude_characters="*", exclude_categories=["Cs"])


@given(st.text(UNBLANKED, min_size=8), st.text(UNBLANKED), st.text(UNBLANKED))
def test_no_value_is_left_in_any_text(value: str, before: str, behind: str):
    assert value not in masked(value).text(before + value + behind)


def test_everything_in_a_report_is_blanked():
    report = {
        "message": "no hunter2-and-more",
        "events": [{"kind": "x", "message": "hunter2-and-more"}],
        "n": 3,
        "x": None,
        "by hunter2-and-more": (1.5, True),
    }
    found = masked("hunter2-and-more").json(report)
    assert found == {
        "message": "no ***",
        "events": [{"kind": "x", "message": "***"}],
        "n": 3,
        "x": None,
        "by ***": [1.5, True],
    }
    assert SecretMask().json(report) is report


def test_a_stream_is_blanked_and_else_as_it_was():
    text = io.StringIO()
    mask = SecretMask()
    stream = MaskedStream(text, mask)
    print("hunter2-and-more before", file=stream)
    mask.hide(["hunter2-and-more"])
    print("hunter2-and-more after", 7, file=stream, flush=True)
    stream.writelines(["no ", "hunter2-and-more\n"])
    assert text.getvalue() == "hunter2-and-more before\n*** after 7\nno ***\n"
    assert not stream.isatty() and stream.write("hunter2-and-more") == len("hunter2-and-more")


def test_what_goes_to_the_control_plane_is_blanked():
    sent = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content))
        return httpx.Response(200, json={"command": "continue"})

    control = ControlPlaneClient("http://127.0.0.1:1", "a-1", "t", mask=masked("hunter2-and-more"))
    control._client = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://127.0.0.1:1")
    control.report({"sequence": 1, "message": "it said hunter2-and-more"})
    assert sent == [{"sequence": 1, "message": "it said ***"}]
