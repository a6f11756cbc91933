"""The dashboard of stored steps: its SQL on a real PostgreSQL, as the role that Grafana is given."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from service.scheduler.programs.plan import Plan
from tests.dashboards.live import ROOT
from tests.service.api.pages.seed import SLOWER, STAGES, STEPS, seed_store
from tests.service.conftest import postgres_url  # noqa: F401


@dataclass
class Grafana:
    """What Grafana has: a connection with few rights, and the ids that a person picked."""

    connection: psycopg.Connection
    job: str
    plan: Plan

    def ask(
        self,
        sql: str,
        step: int = 20,
        *,
        meshes: Sequence[str] = ("mesh0", "mesh1", "mesh2", "mesh10"),
        window_us: tuple[int, int] = (0, 10**6),
    ) -> list[dict[str, Any]]:
        """The answer with variables as Grafana writes them into a query; `window_us` is the time range in milliseconds."""
        values = {
            "${job:sqlstring}": f"'{self.job}'",
            "$step": str(step),
            "${mesh:sqlstring}": ",".join(f"'{mesh}'" for mesh in meshes),
            "${__from}": str(window_us[0]),
            "${__to}": str(window_us[1]),
        }
        for variable, value in values.items():
            sql = sql.replace(variable, value)
        assert "$" not in sql, f"a variable nobody replaces in {sql}"
        cursor = self.connection.execute(sql)
        names = [column.name for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


@pytest.fixture(scope="module")
def grafana(postgres_url: str) -> Iterator[Grafana]:  # noqa: F811
    plain = postgres_url.replace("+psycopg", "")
    with psycopg.connect(plain.format("postgres"), autocommit=True) as connection:
        connection.execute("CREATE DATABASE dashboards")
    seeded = asyncio.run(seed_store(postgres_url.format("dashboards")))
    with psycopg.connect(plain.format("dashboards"), autocommit=True) as owner:
        owner.execute((ROOT / "dashboards" / "reader.sql").read_text())
        _measure_another_job(owner, seeded["running"], seeded["failed"])
        _change_another_step(owner, seeded["running"])
        owner.execute("SET ROLE slotline_reader")
        yield Grafana(owner, seeded["running"], seeded["plan"])


def _measure_another_job(owner: psycopg.Connection, job: str, other: str) -> None:
    """The other job has the same steps, timelines and slots, ten times as long, and a step of its own."""
    changed = {"steps": "step_s, makespan_s, loss", "timelines": "", "slots": "start_s, end_s"}
    for table, columns in changed.items():
        longer = "".join(f", {column} = 10 * {column}" for column in columns.split(", ") if column)
        owner.execute(f"CREATE TEMP TABLE copied AS SELECT * FROM {table} WHERE job_id = '{job}'")
        owner.execute(f"UPDATE copied SET job_id = '{other}'{longer}")
        if table == "slots":
            owner.execute("UPDATE copied SET id = id + (SELECT max(id) FROM slots)")
        owner.execute(f"INSERT INTO {table} SELECT * FROM copied")
        owner.execute("DROP TABLE copied")
    owner.execute(f"UPDATE timelines SET step = 30 WHERE job_id = '{other}' AND step = 40")


def _change_another_step(owner: psycopg.Connection, job: str) -> None:
    """Step 40 of the job itself begins late, is three times as long, splits backwards, and one of its actions is
    another stage's: nothing of it may come into step 20."""
    owner.execute(
        "UPDATE slots SET start_s = 1 + 3 * start_s, end_s = 1 + 3 * end_s, "
        "action = CASE WHEN action <> 'B' THEN action WHEN microbatch % 2 = 0 THEN 'I' ELSE 'W' END, "
        "stage = CASE WHEN action = 'F' AND microbatch = 0 AND mesh = 'mesh0' THEN 'moved' ELSE stage END "
        f"WHERE job_id = '{job}' AND step = 40"
    )


@pytest.fixture(scope="module")
def board() -> dict[str, Any]:
    return json.loads((ROOT / "dashboards" / "slotline-steps.json").read_text())


def sql_of(board: dict[str, Any], title: str) -> str:
    (target,) = next(p for p in board["panels"] if p["title"].startswith(title))["targets"]
    return target["rawSql"]


@pytest.mark.slow
def test_every_query_has_data(grafana: Grafana, board: dict[str, Any]):
    queries = [target["rawSql"] for panel in board["panels"] for target in panel["targets"]]
    assert len(queries) == 8
    for sql in queries:
        assert grafana.ask(sql), sql


@pytest.mark.slow
def test_the_variables_offer_jobs_and_profiled_steps(grafana: Grafana, board: dict[str, Any]):
    job, step, mesh = (v["query"] for v in board["templating"]["list"] if v["type"] == "query")
    offered = grafana.ask(job)
    assert [row["__text"].split()[0] for row in offered] == ["patient", "gpt", "broken"], "newest first"
    assert offered[1]["__value"] == grafana.job
    assert offered[1]["__text"] == f"gpt {grafana.job}"
    assert [row["step"] for row in grafana.ask(step)] == [40, 20]
    assert [row["mesh"] for row in grafana.ask(mesh)] == [f"mesh{k}" for k in range(STAGES)]
    (variable,) = (v for v in board["templating"]["list"] if v["name"] == "mesh")
    assert variable["multi"] and variable["includeAll"] and variable["current"]["value"] == "$__all"


def microseconds(at: datetime) -> float:
    """Where a time of the axis stands in the step: a millisecond after 1970 is a microsecond."""
    return (at - datetime(1970, 1, 1, tzinfo=UTC)) / timedelta(milliseconds=1)


def test_the_timeline_has_every_slot_at_its_microsecond_the_plan_above_the_measurement(
    grafana: Grafana, board: dict[str, Any]
):
    rows = grafana.ask(sql_of(board, "Slots of step"))
    assert len(rows) == 2 * len(grafana.plan.slots) + STAGES
    assert list(rows[0]) == ["row", "start", "end", "Value"], (
        "the state timeline takes the second time as the end"
    )
    names = [name for name, _ in itertools.groupby(row["row"] for row in rows)]
    assert len(names) == len(set(names)), "lane by lane"
    assert names[:2] == ["mesh0 compute plan", "mesh0 compute run"]
    for kind, slower in (("plan", 1.0), ("run", SLOWER)):
        sends = [s for s in grafana.plan.slots if s.mesh == "mesh0" and s.lane == "send:mesh1"]
        shown = [row for row in rows if row["row"] == f"mesh0 send:mesh1 {kind}"]
        assert [row["Value"] for row in shown] == [f"SEND_F{s.microbatch} stage0" for s in sends]
        for row, slot in zip(shown, sends, strict=True):
            assert microseconds(row["start"]) == pytest.approx(1e6 * slower * slot.start_s, abs=1e-2)
            assert microseconds(row["end"]) == pytest.approx(1e6 * slower * slot.end_s, abs=1e-2)
    measured = [row for row in rows if row["row"].endswith("run")]
    assert min(row["start"] for row in measured) == datetime(1970, 1, 1, tzinfo=UTC)
    length_s = grafana.plan.makespan_s * SLOWER + 0.002
    assert microseconds(max(row["end"] for row in measured)) == pytest.approx(1e6 * length_s, abs=1)
    assert {row["Value"] for row in rows if row["Value"].startswith("STEP")} == {"STEP "}


def test_the_timeline_of_a_step_that_begins_late_begins_at_the_origin_too(
    grafana: Grafana, board: dict[str, Any]
):
    rows = [row for row in grafana.ask(sql_of(board, "Slots of step"), step=40) if row["row"].endswith("run")]
    early = [
        row for row in grafana.ask(sql_of(board, "Slots of step"), step=20) if row["row"].endswith("run")
    ]
    assert len(rows) == len(early) and min(microseconds(row["start"]) for row in rows) == 0
    for late, row in zip(rows, early, strict=True):
        for edge in ("start", "end"):
            assert microseconds(late[edge]) == pytest.approx(3 * microseconds(row[edge]), abs=1)
    assert {"I", "W"} <= {row["Value"][0] for row in rows} and "F0 moved" in {row["Value"] for row in rows}


def test_of_many_slots_those_of_the_chosen_meshes_within_the_time_range_are_read(
    grafana: Grafana, board: dict[str, Any]
):
    """A slot that reaches into the range counts; what is read does not grow with the meshes and microbatches beside it."""
    sql = sql_of(board, "Slots of step")
    first_us, last_us = 10_000, 22_000
    rows = grafana.ask(sql, meshes=["mesh1"], window_us=(first_us, last_us))
    slots = [slot for slot in grafana.plan.slots if slot.mesh == "mesh1"]
    for kind, slower in (("plan", 1.0), ("run", SLOWER)):
        inside = [
            slot
            for slot in slots
            if 1e6 * slower * slot.end_s >= first_us and 1e6 * slower * slot.start_s <= last_us
        ]
        shown = [row for row in rows if row["row"].endswith(kind)]
        assert 0 < len(inside) < len(slots) and len(shown) == len(inside)
        starts = sorted(microseconds(row["start"]) for row in shown)
        assert starts == pytest.approx(sorted(1e6 * slower * slot.start_s for slot in inside), abs=1e-2)
    assert {row["row"].split()[0] for row in rows} == {"mesh1"}


def test_rows_stand_in_the_order_of_the_pipeline_and_not_of_the_alphabet(
    grafana: Grafana, board: dict[str, Any]
):
    """mesh10 comes after mesh2; of another attempt than the one that was planned no plan is shown."""
    moved = "UPDATE slots SET mesh = 'mesh10' WHERE mesh = 'mesh1' AND job_id = %s AND step = 20"
    with grafana.connection.transaction(force_rollback=True):
        grafana.connection.execute("RESET ROLE")
        grafana.connection.execute(moved, (grafana.job,))
        grafana.connection.execute("UPDATE plans SET attempt = attempt + 1 WHERE job_id = %s", (grafana.job,))
        grafana.connection.execute("SET ROLE slotline_reader")
        rows = grafana.ask(sql_of(board, "Slots of step"))
    lanes = list(dict.fromkeys(row["row"] for row in rows))
    assert [lane for lane in lanes if " compute" in lane] == [
        "mesh0 compute run",
        "mesh2 compute run",
        "mesh10 compute run",
    ]


@pytest.mark.parametrize("title", ["Loss", "Step time and makespan", "Bubble"])
def test_curves_are_those_of_the_job_in_the_store(grafana: Grafana, board: dict[str, Any], title: str):
    curve = grafana.ask(sql_of(board, title))
    assert [row["step"] for row in curve] == list(range(1, STEPS + 1))
    assert [row["loss"] for row in curve] == pytest.approx(
        [5 * math.exp(-n / 20) for n in range(1, STEPS + 1)]
    )
    for column, value in {"step_s": 0.05, "makespan_s": 0.04, "bubble_ratio": 0.3}.items():
        assert {row[column] for row in curve} == {value}


def test_the_numbers_and_sums_of_a_step_are_its_own(grafana: Grafana, board: dict[str, Any]):
    (row,) = grafana.ask(sql_of(board, "Step $step"), step=7)
    assert row == {
        "step": 7,
        "attempt": 1,
        "loss": pytest.approx(5 * math.exp(-7 / 20)),
        "step_s": 0.05,
        "makespan_s": 0.04,
        "bubble_ratio": 0.3,
        "exposed_transfer_s": 0.001,
        "overlap_ratio": 0.9,
        "grad_norm": 1.0,
        "learning_rate": pytest.approx(0.007),
    }
    seconds = {row["mesh"]: row["seconds"] for row in grafana.ask(sql_of(board, "Compute time"))}
    planned = {mesh.name: mesh.compute_s * SLOWER for mesh in grafana.plan.meshes}
    assert seconds == pytest.approx(planned)
    rows = grafana.ask(sql_of(board, "Compute time"), step=40)
    assert [row["mesh"] for row in rows] == sorted(planned), "one bar a mesh, whatever its stages"
    assert {row["mesh"]: row["seconds"] / 3 for row in rows} == pytest.approx(planned)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT token FROM attempts",
        "SELECT digest FROM tokens",
        "SELECT spec FROM jobs",
        "SELECT content FROM packages",
        "DELETE FROM slots",
    ],
)
def test_the_role_of_grafana_reads_no_secret_and_changes_nothing(grafana: Grafana, sql: str):
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        grafana.connection.execute(sql)
