"""`python -m tests.benchmarks.first_ten_minutes`: a user's first ten minutes as text, written to
results/first_ten_minutes.md.

README's commands in its order, run one after the other from an empty directory, each with its output and its seconds: the
clone is of this tree's last commit. Fails where a command does. Names of this machine are replaced; nothing else is.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from service.client.client import Client

ROOT = Path(__file__).parents[2]
RESULT = Path(__file__).parent / "results" / "first_ten_minutes.md"
JOB = "JOB"
"""Stands in SCENES for the id of the submitted job."""
SERVE = "slotline serve"
_COMMAND_LIMIT_S = 1800.0
_READY_LIMIT_S = 240.0
_STOP_LIMIT_S = 120.0
_SHOWN_LINES = 60


@dataclass(frozen=True)
class Scene:
    """Commands of one part of README, by its heading."""

    heading: str
    commands: tuple[str, ...]


SCENES = (
    Scene("Two commands", ("git clone REPOSITORY slotline", "cd slotline", "make demo")),
    Scene(
        "Your first job",
        (
            "cat job.yaml",
            ". .venv/bin/activate",
            SERVE,
            "slotline check job.yaml",
            "slotline submit job.yaml",
            "slotline init own",
            "slotline check own/job.yaml",
        ),
    ),
    Scene("Plan before you run", ("slotline plan job.yaml",)),
    Scene("Verify", ("slotline verify job.yaml --steps 3",)),
    Scene(
        "Watch",
        (
            "slotline jobs",
            "slotline nodes",
            f"slotline logs {JOB} --follow",
            f"slotline job {JOB}",
            f"slotline events {JOB}",
            f"slotline why {JOB}",
            f"slotline timeline {JOB} -o step.trace.json",
        ),
    ),
)


def readme_job(readme: str) -> str:
    """The job file of README's first job."""
    (text,) = re.findall(r"```yaml\n(.*?)```", readme, re.DOTALL)
    return text


class Film:
    """Runs commands of SCENES in `folder` as one shell would, and keeps what they print, as Markdown."""

    def __init__(self, folder: Path):
        self._folder, self._at = folder, folder
        self._environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "SLOTLINE_", "VIRTUAL_ENV", "MAKE", "MFLAGS"))
        } | {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}
        self._job = ""
        self._server: subprocess.Popen[str] | None = None
        self.lines: list[str] = []

    def play(self, command: str) -> None:
        """Run a command and keep it with its output. Raises RuntimeError where it fails."""
        command = command.replace(JOB, self._job)
        began, used = time.monotonic(), _children_cpu_s()
        output = self._run(command)
        took = f"{time.monotonic() - began:.1f} s, {_children_cpu_s() - used:.1f} s of a processor"
        if command.startswith("slotline submit"):
            (self._job,) = re.findall(r"^job-\w+", output, re.MULTILINE)
        shown = output.splitlines()
        if len(shown) > _SHOWN_LINES:
            left_out = len(shown) - _SHOWN_LINES
            shown[_SHOWN_LINES // 2 : -_SHOWN_LINES // 2] = [f"… ({left_out} lines)"]
        self.lines += ["```console", f"$ {command}", *shown, "```", "", f"_{took}_", ""]

    def _run(self, command: str) -> str:
        if command.startswith("cd "):
            self._at = self._at / command.removeprefix("cd ")
            (self._at / "job.yaml").write_text(readme_job((self._at / "README.md").read_text()))
            return ""
        if command == ". .venv/bin/activate":
            self._environment["PATH"] = f"{self._at / '.venv' / 'bin'}:{self._environment['PATH']}"
            return ""
        if command == SERVE:
            return self._serve()
        done = subprocess.run(
            ["bash", "-c", command.replace("REPOSITORY", str(ROOT))],
            cwd=self._at,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_COMMAND_LIMIT_S,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{command} ended with code {done.returncode}:\n{done.stdout}")
        return done.stdout

    def _serve(self) -> str:
        """Start the server in the background; what it printed until it was ready."""
        log = self._folder / "serve.log"
        with open(log, "w") as file:
            self._server = subprocess.Popen(
                SERVE.split(), cwd=self._at, env=self._environment, stdout=file, stderr=file, text=True
            )
        deadline = time.monotonic() + _READY_LIMIT_S
        with Client("http://127.0.0.1:8000", timeout_s=5.0) as client:
            while (ended := self._server.poll() is not None) or not client.ready():
                if ended or time.monotonic() > deadline:
                    raise RuntimeError(f"{SERVE} is not ready:\n{log.read_text()}")
                time.sleep(0.2)
        return log.read_text()

    def stop(self) -> None:
        """End the server, as Ctrl-C does."""
        if self._server is not None:
            self._server.send_signal(signal.SIGINT)
            self._server.wait(_STOP_LIMIT_S)

    def text(self) -> str:
        """What was kept, without names of this machine."""
        return without_machine("\n".join(self.lines), self._folder)


def without_machine(text: str, folder: Path) -> str:
    """`text` with placeholders for the folder, this machine's name and its addresses other than 127.0.0.1."""
    text = text.replace(str(folder.resolve()), "~").replace(str(folder), "~")
    text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "this-machine", text)
    return re.sub(r"\b(?!127\.0\.0\.1\b)(?:\d{1,3}\.){3}\d{1,3}\b", "10.0.0.1", text)


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextlib.contextmanager
def _film() -> Iterator[Film]:
    with tempfile.TemporaryDirectory(prefix="slotline-film-") as folder:
        film = Film(Path(folder))
        try:
            yield film
        finally:
            film.stop()


def main() -> None:
    load = os.getloadavg()[1]
    began = time.monotonic()
    with _film() as film:
        for scene in SCENES:
            film.lines += [f"## {scene.heading}", ""]
            for command in scene.commands:
                print(f"$ {command}", flush=True)
                film.play(command)
        text = film.text()
    seconds = time.monotonic() - began
    about = (
        f"`python -m tests.benchmarks.first_ten_minutes`, {date.today()}, {os.cpu_count()} cores of a "
        f"{platform.machine()} machine, load {load:.0f} as it began, {os.getloadavg()[1]:.0f} as it ended; "
        f"{seconds / 60:.0f} minutes in all. README's commands in its order, from an empty directory, with what they "
        "printed. Below each: seconds of the clock, and of processors in the command and its own children (Ray's "
        "processes are none). `job.yaml` is README's first job; names of the machine and its addresses are replaced, "
        "and long outputs lack their middle."
    )
    RESULT.write_text(f"# The first ten minutes\n\n{about}\n\n{text.rstrip()}\n")


if __name__ == "__main__":
    main()
