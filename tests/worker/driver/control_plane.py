"""A control plane of one attempt for tests of the driver: it plans for real and keeps what it hears."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.worker.workers import forward_plan_of, placement_of, plan_of, step_plans_of


class ControlPlane:
    """Serves `given` (the attempt with its job) on a port of 127.0.0.1; `reports` and `plan_requests` came."""

    def __init__(self, given: dict[str, Any], profiles: dict[str, Any] | None = None):
        self.given = given
        self.profiles = {} if profiles is None else profiles
        self.reports: list[dict[str, Any]] = []
        self.plan_requests: list[dict[str, Any]] = []
        self.plan_answers: list[dict[str, Any]] = []
        self.step_plan_requests: list[list[list[int]]] = []
        self.placement_requests: list[dict[str, Any]] = []
        self.token: str | None = None
        """The one that the driver exchanged its own for."""
        self.heard = threading.Condition()
        plane = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if "/profile" in self.path:
                    stored = plane.profiles.get(self.path.partition("?")[2])
                    self._answer(200 if stored else 404, stored or {"detail": "none is stored"})
                else:
                    self._answer(200, plane.given)

            def do_PUT(self) -> None:
                plane.profiles[self.path.partition("?")[2]] = self._body()
                self._answer(204, None)

            def do_POST(self) -> None:
                body = self._body()
                if self.path.endswith("/token"):
                    plane.token = body["token"]
                    self._answer(204, None)
                    return
                if self.path.endswith("/placement"):
                    plane.placement_requests.append(body)
                    self._answer(200, placement_of(body))
                    return
                if self.path.endswith("/forward-plan"):
                    self._answer(200, forward_plan_of(body))
                    return
                if self.path.endswith("/replan"):
                    self._answer(200, plane.replan(body))
                    return
                if self.path.endswith("/step-plans"):
                    plane.step_plan_requests.append(body["buckets"])
                    self._answer(200, {"plans": plane.plan_steps(body["buckets"])})
                    return
                if self.path.endswith("/plan"):
                    plane.plan_requests.append(body)
                    try:
                        answer = plane.plan(body)
                        plane.plan_answers.append(answer)
                        self._answer(200, answer)
                    except Exception as error:
                        self._answer(422, {"detail": repr(error)})
                    return
                with plane.heard:
                    plane.reports.append(body)
                    plane.heard.notify_all()
                self._answer(200, {"command": plane.command(), **plane.following(body)})

            def _body(self) -> Any:
                return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

            def _answer(self, status: int, answer: Any) -> None:
                content = b"" if answer is None else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def plan(self, costs: dict[str, Any]) -> dict[str, Any]:
        """The first plan of an attempt."""
        return plan_of(self.given["job"], costs)

    def plan_steps(self, steps: list[list[int]]) -> list[dict[str, Any] | None]:
        """The plans of single steps, by the attempt's first plan and its costs."""
        return step_plans_of(self.given["job"], self.plan_requests[0], self.plan_answers[0], steps)

    def command(self) -> str:
        """What it wants of the attempt, with the answer to a report."""
        return "continue"

    def following(self, report: dict[str, Any]) -> dict[str, Any]:
        """What else the answer to a report has: the next attempt, unless this one's driver is to run none."""
        return {}

    def replan(self, request: dict[str, Any]) -> dict[str, Any]:
        """No shorter plan, unless a test has one."""
        return {"why": "nobody looks for one"}

    @property
    def states(self) -> list[str]:
        return [report["state"] for report in self.reports if report["state"]]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [step for report in self.reports for step in report["steps"]]

    def wait_for_steps(self, count: int, limit_s: float = 120.0) -> None:
        with self.heard:
            assert self.heard.wait_for(lambda: len(self.steps) >= count, limit_s), self.reports[-3:]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
