"""The zip of a folder of code: what a user's shell sees in it, without what is no code."""

from __future__ import annotations

import io
import subprocess
import zipfile
from pathlib import Path, PurePosixPath

import pytest

from service.client.client import Client, ClientError
from service.client.job_spec import zip_folder
from service.settings.settings import Settings
from service.spec.values import shadowing_message
from tests.service.conftest import job_body
from tests.service.serving import serve


def held(folder: Path) -> dict[str, str]:
    with zipfile.ZipFile(io.BytesIO(zip_folder(folder))) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    return tmp_path / "code"


def test_what_links_lead_to_is_in_the_zip_by_the_links_names(tmp_path: Path, code: Path):
    (code / "train.py").write_text("import mine")
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "mine.py").write_text("x = 1")
    (code / "mine.py").symlink_to(Path("..") / "shared" / "mine.py")
    (code / "package").symlink_to(tmp_path / "shared")
    (code / "again").symlink_to(tmp_path / "shared")
    assert held(code) == {
        "train.py": "import mine",
        "mine.py": "x = 1",
        "package/mine.py": "x = 1",
        "again/mine.py": "x = 1",
    }


def test_a_link_that_leads_nowhere_is_named(code: Path):
    (code / "src").mkdir()
    (code / "src" / "mine.py").symlink_to("../../gone.py")
    with pytest.raises(ValueError, match=r"the link src/mine\.py leads nowhere \(\.\./\.\./gone\.py\)"):
        zip_folder(code)


def test_a_link_that_leads_round_in_a_circle_is_named(code: Path):
    (code / "src").mkdir()
    (code / "src" / "all").symlink_to(code)
    with pytest.raises(ValueError, match="the link src/all leads to a folder that it is in"):
        zip_folder(code)


def test_caches_and_virtual_environments_by_any_name_stay_out(code: Path):
    for place in (
        "__pycache__/a.pyc",
        "env-3.11/pyvenv.cfg",
        "env-3.11/lib/b.py",
        ".git/HEAD",
        "node_modules/c.js",
    ):
        path = code / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (code / "kept.py").write_text("1")
    assert held(code) == {"kept.py": "1"}


RULES = "*.bin\n/data/\n!kept.bin\nlogs\n# a comment\n\\#odd.py\n"


def test_what_git_ignores_stays_out(code: Path):
    """Independent: the files that git itself would add."""
    (code / ".gitignore").write_text(RULES)
    names = [
        "a.py",
        "x.bin",
        "kept.bin",
        "data/big.py",
        "src/data/small.py",
        "src/y.bin",
        "logs/z.txt",
        "#odd.py",
    ]
    names += ["deep/kept.bin", "deep/other.py", "src/only here.py", "zürich/ämter.py"]
    for name in names:
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).write_text(name)
    (code / "deep" / ".gitignore").write_text("*.py\n!kept.py\nkept.bin\n")
    git = ["git", "-C", str(code), "-c", "core.quotepath=false"]
    subprocess.run([*git, "init", "-q"], check=True)
    listed = subprocess.run(
        [*git, "ls-files", "--others", "--exclude-standard"], check=True, capture_output=True, text=True
    )
    assert sorted(held(code)) == sorted(listed.stdout.splitlines())


def test_the_same_files_make_the_same_bytes(tmp_path: Path):
    folders = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        for file in ("b.py", "a.py") if name == "one" else ("a.py", "b.py"):
            (folder / file).write_text(file)
        folders.append(folder)
    assert zip_folder(folders[0]) == zip_folder(folders[1])


def test_a_folder_that_is_too_large_names_its_largest_files_and_the_way_out(
    tmp_path: Path, code: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("service.jobs.artifacts.PACKAGE_LIMIT_BYTES", 1000)
    (code / "weights.bin").write_bytes(bytes(range(256)) * 8000)
    (code / "train.py").write_text("pass")
    with (
        serve(Settings(data_dir=tmp_path)) as served,
        Client(served.url) as client,
        pytest.raises(ClientError) as refused,
    ):
        client.upload_code(job_body(code={"working_dir": str(code)}))
    said = str(refused.value)
    assert said.startswith(f"code.working_dir {code} is too large")
    assert "weights.bin (2.0 MB), train.py (0.0 MB)" in said and ".gitignore" in said


@pytest.mark.parametrize(
    ("path", "whose"),
    [
        ("random.py", "Python's own"),
        ("queue/__init__.py", "Python's own"),
        ("torch.py", "the installed one"),
        ("ray/__init__.py", "the installed one"),
    ],
)
def test_a_module_that_hides_one_of_pythons_or_rays_is_refused_by_name(path: str, whose: str):
    message = shadowing_message(PurePosixPath(path))
    assert message is not None and whose in message and "rename it" in message


@pytest.mark.parametrize(
    "path", ["src/random.py", "random/part.py", "random.txt", "test/__init__.py", "mine.py"]
)
def test_other_modules_are_not(path: str):
    assert shadowing_message(PurePosixPath(path)) is None
