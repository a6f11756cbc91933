"""The typed client against a served control plane: what a user's script imports."""

from __future__ import annotations

import functools
import io
import json
import re
import subprocess
import sys
import threading
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import httpx
import pytest

from service.client.client import ApiError, Client, ClientError, UnreachableError
from service.client.job_spec import import_path
from service.control_plane import ControlPlane
from service.orchestrator.attempts.outcome import EventRecord, TimelineRecord
from service.orchestrator.decisions.attempt_lifecycle import RayJob, RayState
from service.orchestrator.ray.local_ray import free_ports
from service.settings.settings import Settings
from service.spec.job import JobSpec
from service.spec.states import AttemptState, JobState
from service.store.attempts import find_attempt
from service.store.database import utc_now
from service.store.measurements import SlotRecord, StepRecord
from service.store.plans import record_job_plan
from tests.polling import until
from tests.service.api.routers.test_job_plans import costs
from tests.service.api.routers.test_plans_api import SPEC
from tests.service.conftest import job_body
from tests.service.serving import Served, report, serve
from worker.contract.costs import PROFILE_RESULT_MARK

README = Path(__file__).parents[3] / "service" / "README.md"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serve(Settings(data_dir=tmp_path)) as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with Client(served.url, token="") as client:
        yield client


def started(served: Served, client: Client) -> str:
    """A job whose first attempt was given to the cluster."""
    job_id = client.submit(job_body()).id
    until(lambda: f"{job_id}-1" in served.cluster.submissions)
    return job_id


def step(number: int) -> StepRecord:
    return StepRecord(number, *([1.0] * 8), metrics={"accuracy": number / 2000})


def test_a_job_is_submitted_as_a_mapping_or_a_jobspec_and_a_key_submits_once(client: Client):
    first = client.submit(job_body(), idempotency_key="k")
    again = client.submit(JobSpec.model_validate(job_body()), idempotency_key="k")
    other = client.submit(job_body())
    assert first.id == again.id != other.id
    assert first.state is JobState.QUEUED and first.progress.steps == 10


def test_answers_hold_all_that_the_api_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The cluster is looked at once: between two answers nothing changes."""
    monkeypatch.setattr("service.control_plane.CLUSTER_REFRESH_S", 3600.0)
    settings = Settings(data_dir=tmp_path)
    with serve(settings) as served, Client(served.url, token="") as client:
        job_id = started(served, client)
        report(served, job_id, 1, state=AttemptState.RUNNING, steps=[step(1)])

        def raw(path: str) -> httpx.Response:
            return httpx.get(f"{served.url}/api/v1/{path}", trust_env=False)

        for path, model in (
            (f"jobs/{job_id}", client.job(job_id)),
            ("cluster", client.cluster()),
            ("version", client.version()),
        ):
            assert model.model_dump(mode="json") == raw(path).json()
        assert raw(f"jobs/{job_id}/timeline").status_code == 404
        assert [q.model_dump(mode="json") for q in client.queues()] == raw("queues").json()["items"]


def test_jobs_are_listed_page_after_page_as_they_are_asked_for(
    client: Client, served: Served, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("service.client.client._PAGE_SIZE", 2)
    ids = [client.submit(job_body(name=f"n{number}")).id for number in range(5)][::-1]
    assert [job.id for job in client.jobs()] == ids
    assert [job.id for job in client.jobs(limit=3)] == ids[:3]
    assert list(client.jobs(limit=0)) == []
    before = served.requests("/api/v1/jobs")
    assert next(client.jobs()).id == ids[0]
    assert served.requests("/api/v1/jobs") == before + 1
    until(lambda: list(client.jobs(state=JobState.STARTING)))
    begun = {job.id for job in client.jobs(state=JobState.STARTING)}
    assert {job.id for job in client.jobs(state=JobState.QUEUED)} <= set(ids) - begun
    assert list(client.jobs(queue="other")) == []


def test_a_job_is_cancelled_and_retried(served: Served, client: Client):
    started(served, client)
    waiting = client.submit(job_body()).id
    assert client.cancel(waiting).state is JobState.CANCELLED
    assert client.wait(waiting).state is JobState.CANCELLED
    assert client.retry(waiting).state is JobState.QUEUED
    with pytest.raises(ApiError, match="QUEUED") as refused:
        client.retry(waiting)
    assert (refused.value.status, refused.value.title) == (409, "Conflict")
    assert not refused.value.temporary


def test_a_problem_is_an_exception_with_its_fields(client: Client):
    with pytest.raises(ApiError) as refused:
        client.submit(job_body(training={"global_batch": 10, "microbatches": 4}))
    error = refused.value
    assert (error.status, error.title) == (422, "Unprocessable Entity")
    assert str(error) == error.detail and "set microbatches to 2" in error.detail
    assert error.errors[0]["field"] == "training"
    with pytest.raises(ApiError, match="there is no job job-none"):
        client.job("job-none")


@pytest.mark.slow
def test_events_and_logs_are_read_in_pages_and_from_any_place(served: Served, client: Client):
    job_id = started(served, client)
    served.cluster.logs[f"{job_id}-1"] = "".join(f"line {number}\n" for number in range(1, 1501))
    report(served, job_id, 1, events=[EventRecord(utc_now(), "note", str(n)) for n in range(600)])
    events = list(client.events(job_id))
    assert [event.number for event in events] == list(range(1, len(events) + 1)) and len(events) > 600
    assert list(client.events(job_id, after=events[550])) == events[551:]
    lines = list(client.logs(job_id))
    assert [line.text for line in lines] == [f"line {number}" for number in range(1, 1501)]
    assert list(client.logs(job_id, after=lines[1400], attempt=1)) == lines[1401:]


def test_a_job_is_followed_to_its_end_from_where_one_was(served: Served, client: Client):
    job_id = started(served, client)
    served.cluster.logs[f"{job_id}-1"] = "one\ntwo\n"
    seen = list(client.events(job_id))
    timer = threading.Timer(0.3, report, (served, job_id, 1), {"state": AttemptState.SUCCEEDED})
    timer.start()
    followed = list(client.events(job_id, after=seen[-1], follow=True))
    timer.join()
    assert followed[-1].message == "SUCCEEDED" and seen + followed == list(client.events(job_id))
    assert list(client.events(job_id, after=followed[-1], follow=True)) == []
    assert [line.text for line in client.logs(job_id, follow=True)] == ["one", "two"]


@pytest.mark.slow
def test_a_stream_that_breaks_is_taken_up_where_it_broke(tmp_path: Path):
    (port,) = free_ports(1)
    settings = Settings(data_dir=tmp_path, port=port)
    events = []
    with Client(f"http://127.0.0.1:{port}", token="") as client:

        def follow() -> None:
            for event in client.events(job_id, follow=True):
                events.append(event)

        with serve(settings, port=port) as served:
            job_id = started(served, client)
            thread = threading.Thread(target=follow)
            thread.start()
            until(lambda: events)  # one that has not begun is not taken up
        with serve(settings, port=port) as served:
            report(served, job_id, 1, state=AttemptState.SUCCEEDED)
            thread.join(60)
            assert not thread.is_alive() and events == list(client.events(job_id))


@pytest.mark.slow
def test_steps_plan_timeline_and_trace_of_a_job(served: Served, client: Client):
    job_id = started(served, client)
    slot = SlotRecord("m0", "compute", "F", "s0", None, None, None, 0, 0.0, 0.004)
    timeline = TimelineRecord(step=2, started_at=1.0, uncertainty_s=None, slots=[slot])
    report(served, job_id, 1, timelines=[timeline], steps=[step(number) for number in range(1, 1201)])

    async def store_plan(plane: ControlPlane) -> None:
        body = {"begins": ["a"], "spec": {}, "plan": {"makespan_s": 2.0, "slots": []}}
        async with plane.database.write() as session:
            attempt = await find_attempt(session, f"{job_id}-1")
            await record_job_plan(session, attempt, json.dumps(body), at=utc_now())

    served.run(store_plan)
    assert [one.step for one in client.steps(job_id)] == list(range(1, 1201))
    assert [one.step for one in client.steps(job_id, after=1198)] == [1199, 1200]
    frame = client.steps(job_id).to_pandas()
    assert list(frame.index) == list(range(1, 1201))
    assert list(frame["loss"]) == [one.loss for one in client.steps(job_id)]
    assert list(frame["accuracy"]) == [one.metrics["accuracy"] for one in client.steps(job_id)]
    assert len(client.evaluations(job_id).to_pandas()) == 0
    assert client.plan(job_id).plan["makespan_s"] == 2.0
    view = client.timeline(job_id)
    assert view.step == 2 and view.measured.slots[0].end_s == 0.004
    assert client.timeline(job_id, 2) == view
    assert repr(view) == f"<timeline of {job_id}, step 2: planned 2000 ms, measured 1000 ms>"
    picture = ElementTree.fromstring(view.svg())
    assert [one.text for one in picture.iter("{http://www.w3.org/2000/svg}title")] == [
        "F s0 microbatch 0: 0 to 0.004 s"
    ]
    assert view.svg() in view._repr_html_()
    with Client(client.url, token="") as closed:
        left = closed.timeline(job_id)
    assert "has no picture" in left._repr_html_() and "<timeline" not in left._repr_html_()
    names = [e["name"] for e in json.loads(client.chrome_trace(job_id))["traceEvents"] if e["ph"] == "X"]
    assert names == ["F s0/0"]
    with pytest.raises(ApiError, match="choose one of 2"):
        client.timeline(job_id, 9)


def test_functions_stand_for_their_import_paths_and_a_folder_of_code_is_uploaded(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As the README says it, with a module of the user's."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "training.py").write_text("class Tokens: ...\ndef build(layers): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    _, script = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names = {"client": client}
    try:
        exec(script, names)
    finally:
        sys.modules.pop("training", None)
    spec = client.job(names["job"].id).spec
    assert (spec["model"]["factory"], spec["model"]["args"]) == ("training:build", {"layers": 8})
    assert (spec["data"]["factory"], spec["data"]["args"]) == ("training:Tokens", {"length": 64})
    assert spec["loss"]["factory"] == "torch.nn.functional:cross_entropy"
    assert spec["optimizer"]["factory"] == "torch.optim.adamw:AdamW"
    assert spec["resources"]["meshes"] == 4
    assert spec["code"]["working_dir"].startswith("package:")
    again = client.submit(spec, name="again")
    assert {**client.job(again.id).spec, "name": "mine"} == spec


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": lambda: None}, r"<lambda> is defined in a function, .* write it into a module"),
        ({"model": functools.partial(step, 3)}, r"model is partial with the positional arguments \(3,\)"),
        ({"model": {"factory": "a:b", "args": {"act": len}}}, r"model.args.act is the function"),
        ({"loss": functools.lru_cache(step)}, r"is not this <functools"),
        ({"code": {"working_dir": "nowhere"}}, r"code.working_dir nowhere is no folder"),
    ],
)
def test_what_workers_could_not_import_is_refused_before_it_is_sent(
    client: Client, served: Served, fields: dict, message: str
):
    with pytest.raises(ClientError, match=message):
        client.submit(job_body(), **fields)
    assert served.requests("/api/v1/jobs") == 0


def test_what_a_notebook_itself_defines_names_the_way_out():
    build = types.FunctionType(
        compile("def build(): ...", "cell", "exec").co_consts[0], {"__name__": "__main__"}
    )
    build.__module__ = "__main__"
    with pytest.raises(ValueError, match="defined in this notebook or script"):
        import_path(build)


@pytest.mark.slow
def test_a_pipeline_is_planned_without_a_job(client: Client):
    assert json.loads(client.make_plan(SPEC))["chosen"] == "1f1b"
    assert client.make_plan(SPEC, format="svg").startswith("<svg")


@pytest.mark.slow
def test_the_plan_of_a_job_is_waited_for_while_one_worker_measures_it_but_not_for_ever(
    served: Served, client: Client
):
    served.run(lambda service: service.cluster.refresh())
    told: list[str] = []
    with pytest.raises(ClientError, match=r"one worker measures .* more than 4 s: ask again"):
        client.plan_job(job_body(), limit_s=4.0, waiting=told.append)
    assert len(told) == 1 and len(served.cluster.submissions) == 1
    (run_id,) = served.cluster.submissions
    served.cluster.logs[run_id] = f"{PROFILE_RESULT_MARK}{json.dumps({'costs': costs((4,))})}\n"
    served.cluster.states[run_id] = RayJob(RayState.SUCCEEDED)
    found = client.plan_job(JobSpec.model_validate(job_body()), budget_s=0.2)
    assert found.spec["microbatches"] == 4 and found.begins == [f"layers.{index}" for index in range(4)]
    assert found.measured_by == "one worker" and found.step_s == found.plan["makespan_s"] + found.update_s


def test_code_is_uploaded_and_named_by_a_job(client: Client):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("model.py", "x = 1\n")
    package = client.upload_package(buffer.getvalue())
    assert client.upload_package(buffer.getvalue()) == package
    job = client.submit(job_body(code={"working_dir": package.uri}))
    assert job.spec["code"]["working_dir"] == package.uri


def test_url_and_token_come_from_the_environment_unless_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with serve(Settings(data_dir=tmp_path, api_token="secret")) as served:
        monkeypatch.setenv("SLOTLINE_URL", served.url)
        monkeypatch.setenv("SLOTLINE_API_TOKEN", "secret")
        assert list(Client().jobs()) == [] and Client().ready()
        with pytest.raises(ApiError, match="token") as refused:
            list(Client(token="wrong").jobs())
        assert refused.value.status == 401


def test_a_server_that_is_away_or_is_none_is_told_apart():
    (port,) = free_ports(1)
    with Client(f"http://127.0.0.1:{port}", token="") as client:
        assert not client.ready()
        with pytest.raises(UnreachableError, match="slotline serve") as away:
            client.cluster()
        assert away.value.temporary
    with pytest.raises(ClientError, match="no address"):
        Client("http://[::1")


def test_the_script_of_the_readme_runs(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("SLOTLINE_URL", served.url)
    monkeypatch.delenv("SLOTLINE_API_TOKEN", raising=False)
    script, _ = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)

    def drive() -> None:
        until(lambda: served.cluster.submissions)
        job_id = next(iter(served.cluster.submissions)).rpartition("-")[0]
        report(served, job_id, 1, steps=[step(1)], state=AttemptState.SUCCEEDED)

    thread = threading.Thread(target=drive)
    thread.start()
    names = {"spec": job_body()}
    exec(script, names)
    thread.join()
    assert names["losses"] == [1.0] and capsys.readouterr().out.endswith("SUCCEEDED\n")


def test_a_script_that_imports_the_client_imports_no_server():
    heavy = ("fastapi", "starlette", "sqlalchemy", "ray", "torch", "numpy", "numba", "ortools", "typer")
    program = f"import sys, service.client.client; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
