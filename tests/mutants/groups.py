"""Which files are changed, and the tests that must notice: those of the file, quick ones, the most biting first."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Group:
    """Files that the same tests watch."""

    name: str
    patterns: str
    tests: str

    def files(self, checkout: Path) -> list[Path]:
        """Relative to the checkout."""
        found = (path for pattern in self.patterns.split() for path in sorted(checkout.glob(pattern)))
        return [path.relative_to(checkout) for path in found if path.name != "__init__.py"]


_SCHEDULER = "tests/service/scheduler"
_API = "tests/service/api"
_ENGINE = "tests/worker/engine"
GROUPS = [
    Group(
        "scheduler",
        "service/scheduler/problem/*.py service/scheduler/programs/*.py",
        f"{_SCHEDULER}/problem {_SCHEDULER}/programs {_SCHEDULER}/schedules/test_schedules.py "
        f"{_SCHEDULER}/test_properties.py -k '(not every_wait or zb-h1-full-duplex) and not kept_by_the_simulator'",
    ),
    Group(
        "decide",
        "service/orchestrator/decisions/attempt_lifecycle.py",
        "tests/service/orchestrator/decisions/test_attempt_lifecycle.py",
    ),
    Group(
        "outcome",
        "service/orchestrator/attempts/outcome.py",
        "tests/service/orchestrator/attempts/test_outcome.py tests/service/orchestrator/attempts/test_next_attempts.py "
        f"{_API}/routers/test_nodes.py",
    ),
    Group(
        "states",
        "service/store/transitions.py",
        "tests/service/store/test_transitions.py tests/service/store/test_jobs.py -k 'not postgresql'",
    ),
    Group(
        "auth",
        "service/api/auth.py",
        f"{_API}/routers/test_jobs.py {_API}/test_auth.py {_API}/test_oidc.py {_API}/test_sso.py "
        "-k 'not postgresql and (token or open or oidc or role or sso)'",
    ),
    Group(
        "paging",
        "service/api/streams.py service/api/routers/activity.py service/jobs/timelines.py",
        f"{_API}/routers/test_observe.py {_API}/routers/test_streams.py "
        f"{_API}/routers/test_drivers.py -k 'not postgresql and not prometheus "
        "and not profiles and not metrics and not pause and not neither_ends and not few_calls'",
    ),
    Group(
        "engine",
        "worker/engine/actions.py worker/engine/optim/reduce_and_step.py worker/model/rng.py",
        f"{_ENGINE}/test_tied.py {_ENGINE}/optim/test_reduce_and_step.py {_ENGINE}/test_buffers.py "
        f"{_ENGINE}/test_heterogeneous_engines.py tests/worker/model/test_rng.py",
    ),
    Group(
        "gradients",
        "worker/contract/buckets.py worker/engine/forward.py worker/engine/optim/state_dict.py worker/engine/lowering.py",
        f"{_ENGINE}/optim/test_state_dict.py {_ENGINE}/test_lowering.py {_ENGINE}/test_reduction.py "
        f"{_ENGINE}/recomputation/test_recompute.py {_ENGINE}/test_swapping.py -k 'not traced_models'",
    ),
    Group(
        "batches",
        "worker/model/rng.py worker/actor/batch_feed.py",
        "tests/worker/actor/test_batch_feed.py tests/worker/model/test_rng.py",
    ),
    Group("checkpoint", "worker/checkpoint/format.py", "tests/worker/checkpoint/test_format.py"),
    Group("report", "worker/driver/reporter.py", "tests/worker/driver/test_reporter.py"),
    Group(
        "dashboard",
        "dashboards/slotline-cluster.json dashboards/slotline-job.json dashboards/slotline-timeline.json "
        "dashboards/slotline-control-plane.json",
        "tests/dashboards/test_dashboard.py --deselect "
        "tests/dashboards/test_dashboard.py::test_the_committed_dashboards_are_what_the_code_builds",
    ),
    Group(
        "stored-steps",
        "dashboards/slotline-steps.json dashboards/reader.sql",
        "tests/dashboards/test_stored_steps.py",
    ),
    Group("rules", "dashboards/rules.yml", "tests/dashboards/test_rules.py"),
]

_BY_DAY = "not (slow or matrix or postgres or ray or gpu)"
_LEFT_OUT = ("migrations", "templates", "static")


def rooms(checkout: Path) -> list[Group]:
    """A group for each package of service and worker: its modules, and the tests by day of the folder of tests/ that
    mirrors it, or the nearest one above that has tests."""
    found = []
    for root in ("service", "worker"):
        for folder in sorted(
            {path.parent.relative_to(checkout) for path in checkout.glob(f"{root}/**/*.py")}
        ):
            group = Group(folder.as_posix(), f"{folder.as_posix()}/*.py", _mirror(checkout, folder))
            if group.tests and group.files(checkout) and not {*folder.parts} & {*_LEFT_OUT}:
                found.append(group)
    return found


def _mirror(checkout: Path, folder: Path) -> str:
    """Arguments of pytest; empty where there are no tests."""
    for above in (folder, *folder.parents):
        files = sorted((checkout / "tests" / above).glob("test_*.py"))
        if files:
            names = [file.relative_to(checkout).as_posix() for file in files]
            return f"{shlex.join(names)} -m {shlex.quote(_BY_DAY)}"
    return ""
