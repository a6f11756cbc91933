"""`slotline backup` while jobs run and `slotline restore`, on SQLite with its key of secrets and on PostgreSQL."""

from __future__ import annotations

import io
import json
import shutil
import stat
import tarfile
from pathlib import Path

import pytest
from sqlalchemy import make_url

from service.client import Client
from service.client.client import ApiError
from service.settings.settings import Settings
from service.spec.states import AttemptState
from service.store.database import known_revisions
from service.store.measurements import StepRecord
from service.store.secrets import KEY_FILE, SecretBox, open_secrets
from tests.polling import until
from tests.service.cli.conftest import Run
from tests.service.conftest import create_postgres_database, job_body
from tests.service.fake_cluster import FakeCluster
from tests.service.serving import Served, report, serve

KEY = "k" * 32


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def settings(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings of a control plane with a database of each kind; the command has the same."""
    data = tmp_path / "data"
    monkeypatch.setenv("SLOTLINE_DATA_DIR", str(data))
    if request.param == "sqlite":
        return Settings(data_dir=data)
    if shutil.which("pg_dump") is None:
        pytest.skip("pg_dump is not installed")
    url = create_postgres_database(request.getfixturevalue("postgres_url"))
    monkeypatch.setenv("SLOTLINE_DATABASE_URL", url)
    monkeypatch.setenv("SLOTLINE_SECRETS_KEY", KEY)
    return Settings(data_dir=data, database_url=url, secrets_key=KEY)


def step(number: int, loss: float) -> StepRecord:
    return StepRecord(number, loss, 0.1, None, None, None, None, None, None)


def started(served: Served, name: str) -> str:
    """A job whose driver runs."""
    job = Client(served.url).submit(job_body(name=name))
    until(lambda: f"{job.id}-1" in served.cluster.submissions)
    report(served, job.id, 1, state=AttemptState.RUNNING, steps=[step(1, 2.5)])
    return job.id


def secret(served: Served, settings: Settings, name: str) -> str:
    async def work(service) -> str:
        async with service.database.read() as session:
            return (await open_secrets(session, SecretBox.of(settings), "", [name]))[name]

    return served.run(work)


def lose(settings: Settings, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Settings:
    """The disk or the server is gone: an empty one in its place."""
    if not settings.database_url:
        shutil.rmtree(settings.data_dir)
        return settings
    url = create_postgres_database(request.getfixturevalue("postgres_url"))
    monkeypatch.setenv("SLOTLINE_DATABASE_URL", url)
    return settings.model_copy(update={"database_url": url})


@pytest.mark.slow
def test_a_job_that_runs_over_a_backup_and_its_restoration_goes_on(
    settings: Settings,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
):
    file = tmp_path / "slotline.tar"
    cluster = FakeCluster(workers=8)
    with serve(settings, cluster=cluster) as served:
        Client(served.url).set_secret("HF_TOKEN", "hf_12345678")
        job = started(served, "before")
        done = run("backup", str(file), "--json")
        assert done.code == 0, done.err
        assert done.json["kind"] == make_url(settings.sqlalchemy_url).get_backend_name()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, "it may hold the key of secrets"
        report(served, job, 2, steps=[step(2, 2.0)])
        later = started(served, "after")
        refused = run("restore", str(file), "--replace")
        assert refused.code == 1 and "serves" in refused.err
    settings = lose(settings, monkeypatch, request)
    restored = run("restore", str(file))
    assert restored.code == 0, restored.err
    with serve(settings, cluster=cluster) as served:
        client = Client(served.url)
        assert client.job(job).state == "RUNNING"
        assert secret(served, settings, "HF_TOKEN") == "hf_12345678"
        with pytest.raises(ApiError, match=later):
            client.job(later)
        report(served, job, 3, steps=[step(3, 1.5)], state=AttemptState.SUCCEEDED)
        assert client.job(job).state == "SUCCEEDED"
        assert list(cluster.submissions) == [f"{job}-1", f"{later}-1"], "nothing was started twice"


def test_a_database_that_has_tables_is_replaced_only_where_it_is_said(
    settings: Settings, run: Run, tmp_path: Path
):
    file = tmp_path / "slotline.tar"
    with serve(settings) as served:
        first = Client(served.url).submit(job_body(name="first")).id
        assert run("backup", str(file)).code == 0
        second = Client(served.url).submit(job_body(name="second")).id
    refused = run("restore", str(file))
    assert refused.code == 1 and "--replace" in refused.err
    with serve(settings) as served:
        assert Client(served.url).job(second).name == "second", "nothing was changed"
    done = run("restore", str(file), "--replace", "--json")
    assert done.code == 0 and done.json["revision"], done.err
    with serve(settings) as served:
        assert [job.id for job in Client(served.url).jobs()] == [first]
    if not settings.database_url:
        assert (settings.data_dir / "slotline.db.before-restore").is_file()


def test_the_key_of_secrets_that_a_restoration_replaces_stays(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    data, file = tmp_path / "data", tmp_path / "slotline.tar"
    monkeypatch.setenv("SLOTLINE_DATA_DIR", str(data))
    assert run("migrate").code == 0
    SecretBox.of(Settings(data_dir=data))
    key = (data / KEY_FILE).read_text()
    assert run("backup", str(file)).code == 0
    (data / KEY_FILE).write_text("another")
    assert run("restore", str(file), "--replace").code == 0
    assert (data / KEY_FILE).read_text() == key
    assert (data / f"{KEY_FILE}.before-restore").read_text() == "another"


def archive(**members: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in members.items():
            entry = tarfile.TarInfo(name.replace("_", "."))
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return out.getvalue()


ABOUT = {"format": 1, "kind": "sqlite", "revision": known_revisions()[0], "slotline": "9.9", "made_at": "now"}


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"no tar", "no whole backup"),
        (archive(backup_json=json.dumps(ABOUT).encode()), "slotline.db"),
        (archive(backup_json=json.dumps(ABOUT).encode(), slotline_db=b"x" * 9000), "damaged"),
        (archive(backup_json=json.dumps({**ABOUT, "format": 2}).encode()), "format 2"),
        (
            archive(backup_json=json.dumps({**ABOUT, "revision": "x"}).encode(), slotline_db=b""),
            "of Slotline 9.9",
        ),
        (
            archive(backup_json=json.dumps({**ABOUT, "kind": "postgresql"}).encode(), slotline_dump=b""),
            "SLOTLINE_DATABASE_URL",
        ),
    ],
    ids=[
        "no archive",
        "no tables",
        "damaged tables",
        "another format",
        "a newer version",
        "another database",
    ],
)
def test_what_cannot_be_restored_is_refused_and_changes_nothing(
    content: bytes, word: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SLOTLINE_DATA_DIR", str(tmp_path / "data"))
    file = tmp_path / "slotline.tar"
    file.write_bytes(content)
    refused = run("restore", str(file))
    assert refused.code == 1 and word in " ".join(refused.err.split())
    assert not (tmp_path / "data").exists()


def test_a_backup_of_nothing_is_refused_and_leaves_no_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SLOTLINE_DATA_DIR", str(tmp_path / "data"))
    refused = run("backup", str(tmp_path / "slotline.tar"))
    assert refused.code == 1 and "there is no database" in refused.err
    assert list(tmp_path.iterdir()) == []
