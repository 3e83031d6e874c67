"""The wheel alone: its commands work outside a checkout, whatever folders are around."""

import json
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from flows.identity.fingerprint import Code
from flows.profiles import open_profile
from flows.stages import STAGES
from infra.storage.local import LocalStore
from nanochat_flows.packages import PACKAGES
from tests.support.flows.house import build as build_stages
from tests.support.installed import FILLED_IN, ROOT, Installed, build, wheel
from tests.support.pythons import PYTHONS

__all__ = ["wheel"]

FOLDERS = {"compose": "containers"} | {
    kind: kind for kind in ("systemd", "slurm", "kubernetes", "skypilot")
}
OF_A_CHECKOUT = {"Dockerfile", "Dockerfile.dockerignore"}
PASSWORDS = {Path(name).name for name in FILLED_IN}


def files_in(folder: Path) -> dict[str, bytes]:
    """Path below the folder -> content, without code and passwords."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in files
        if path.suffix not in (".py", ".pyc") and path.name not in OF_A_CHECKOUT | PASSWORDS
    }


FOREIGN = "raise RuntimeError('code of another project')\n"


@pytest.fixture
def foreign(wheel: Installed, tmp_path: Path) -> Installed:
    """The same environment, used from a directory with folders that have our packages' names."""
    for name in (*PACKAGES, "torch"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(FOREIGN)
    return replace(wheel, cwd=tmp_path)


def test_it_plans_as_the_checkout_does_whatever_folders_are_around(
    foreign: Installed, tmp_path: Path
) -> None:
    """One version of the code has the same fingerprints wherever it lies."""
    home = tmp_path / "built"
    tiny = open_profile("tiny").run
    build_stages(LocalStore(home / "store"), home / "work", Code(ROOT), run=tiny)
    done = foreign.run("nanochat", "plan", "tiny", "--json", NANOCHAT_HOME=str(home))
    assert (done.returncode, done.stderr) == (0, "")
    planned = {item["stage"]: item["state"] for item in json.loads(done.stdout)["stages"]}
    assert planned == dict.fromkeys([stage.name for stage in STAGES], "=")


def test_its_code_comes_from_the_wheel(wheel: Installed) -> None:
    code = "import flows, nanochat_flows; print(flows.__file__, nanochat_flows.__file__)"
    done = wheel.run("python", "-c", code)
    assert str(ROOT) not in done.stdout
    assert done.stdout.count("site-packages") == 2


# Below the first argument, one process for all kinds.
WRITE_INFRA = """
import sys
from flows.cli.app import main
sys.exit(any([main(["infra", kind, f"{sys.argv[1]}/{kind}"]) for kind in sys.argv[2:]]))
"""


def test_it_writes_every_file_of_infra_and_a_checkout_none_with_passwords(
    wheel: Installed, tmp_path: Path
) -> None:
    # In a checkout python -c imports from it, the current directory.
    for cwd, root in ((wheel.cwd, ROOT), (wheel.source, wheel.source)):
        made = tmp_path / cwd.name
        done = replace(wheel, cwd=cwd).run("python", "-c", WRITE_INFRA, str(made), *FOLDERS)
        assert (done.returncode, done.stderr) == (0, "")
        for kind, folder in FOLDERS.items():
            files, target = files_in(root / "infra" / folder), made / kind
            assert files_in(target) == files
            written = {path.relative_to(target).as_posix() for path in target.rglob("*.*")}
            assert written == set(files)


def test_neither_it_nor_an_sdist_has_a_file_with_passwords(
    wheel: Installed, tmp_path: Path
) -> None:
    (packages,) = wheel.bin.parent.glob("lib/python*/site-packages")
    assert [name for name in FILLED_IN if not (wheel.source / name).is_file()] == []
    assert [name for name in FILLED_IN if (packages / name).exists()] == []
    with tarfile.open(build("sdist", wheel.source, tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert "infra/kubernetes/secrets.example.yaml" in names
    assert names & set(FILLED_IN) == set()


def test_it_has_every_file_that_its_modules_read(wheel: Installed) -> None:
    (packages,) = wheel.bin.parent.glob("lib/python*/site-packages")
    folders = ("flows", "nanochat_core", "tasks")
    read = {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert {name for name in read if not (packages / name).is_file()} == set()


TYPED = """
# pyright: strict
from nanochat_flows.client import open_client

reveal_type(open_client().chat("tiny").ask("?"))
open_client().fetch(7, "directory")
"""


def test_a_type_checker_reads_its_types(wheel: Installed, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TYPED)
    words = ["--pythonpath", str(wheel.bin / "python"), "--outputjson", "mine.py"]
    command = [sys.executable, "-m", "pyright", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    # Without py.typed a third complaint would be about the import.
    revealed, refused = (item["message"] for item in json.loads(done.stdout)["generalDiagnostics"])
    assert revealed.endswith('is "str"')
    assert '"Literal[7]" cannot be assigned to parameter "name"' in refused


@pytest.mark.skipif(not PYTHONS, reason="no other Python from 3.11 on, on PATH or under pyenv")
def test_it_compiles_and_plans_on_another_python(wheel: Installed, tmp_path: Path) -> None:
    # What this version and the newest take, those between take too.
    newest = max(PYTHONS, key=lambda version: [*map(int, version.split("."))])
    (packages,) = wheel.bin.parent.glob("lib/python*/site-packages")
    dependencies = (packages / "dependencies.pth").read_text().strip()
    # Planning needs no compiled package, so those of this Python do.
    variables = {
        "PYTHONPATH": f"{packages}:{dependencies}",
        "PYTHONPYCACHEPREFIX": str(tmp_path),
        "PYTHONWARNINGS": "error::SyntaxWarning",
    }
    python = str(PYTHONS[newest])
    modules = [str(packages / name) for name in (*PACKAGES, "nanochat_flows")]
    done = wheel.run(python, "-m", "compileall", "-q", "-f", *modules, **variables)
    assert (done.returncode, done.stdout) == (0, "")
    del variables["PYTHONWARNINGS"]  # of the dependencies
    done = wheel.run(python, "-m", "nanochat_flows", "plan", "tiny", "--json", **variables)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(json.loads(done.stdout)["stages"]) == len(STAGES)


def test_its_page_on_an_index_has_no_link_that_leads_nowhere(wheel: Installed) -> None:
    code = "import importlib.metadata as m; print(m.metadata('nanochat-flows').get_payload())"
    page = wheel.run("python", "-c", code).stdout
    assert re.search(r"^## (.+)$", page, flags=re.MULTILINE)[1] == "Install"
    assert re.findall(r"\]\((?!https?:)[^)]*\)", page) == []


def test_the_documentation_travels_with_its_links(wheel: Installed) -> None:
    folder = wheel.bin.parent / "share" / "doc" / "nanochat-flows"
    pages = [path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md")]
    assert [page for page in (*pages, Path("README.md")) if not (folder / page).is_file()] == []
    links = {
        (page.parent / link).resolve()
        for page in folder.rglob("*.md")
        for link in re.findall(r"\]\(([^)#:]+\.(?:md|png))[)#]", page.read_text())
    }
    assert len(links) > 50
    assert [link for link in links if not link.exists()] == []


@pytest.mark.torch
def test_programs_that_it_starts_do_not_import_them_either_and_a_run_lacks_nothing(
    foreign: Installed,
) -> None:
    done = foreign.run("nanochat", "doctor", "--json")
    states = {check["name"]: check["state"] for check in json.loads(done.stdout)["checks"]}
    ours = ("python", "prefect", "sqlalchemy", "fastapi", "torch", "put", "server")
    assert {states[name] for name in ours} == {"ok"}, done.stdout


def test_a_script_learns_which_folder_beside_it_is_in_the_way(foreign: Installed) -> None:
    (foreign.cwd / "mine.py").write_text("import nanochat_flows.client\n")
    done = foreign.run("python", "mine.py")
    assert done.returncode == 1
    place = foreign.cwd / PACKAGES[0]
    assert f"ImportError: Python imports {place} in place of" in done.stderr
    assert "hint: rename it" in done.stderr


def test_a_module_on_the_path_is_refused_and_a_folder_without_code_is_not(
    wheel: Installed, tmp_path: Path
) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "notes.txt").write_text("a list of tasks")
    done = wheel.run("nanochat", "plan", "tiny", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")

    (tmp_path / "infra.py").write_text(FOREIGN)
    done = wheel.run("nanochat", "plan", "tiny", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    error, hint = done.stderr.splitlines()
    assert error.startswith(f"error: Python imports {tmp_path / 'infra.py'} in place of")
    assert hint.startswith(f"hint: rename it, or take {tmp_path} off PYTHONPATH")


def test_python_m_says_that_the_current_directory_is_in_the_way(foreign: Installed) -> None:
    done = foreign.run("python", "-m", "nanochat_flows", "plan", "tiny")
    assert done.returncode == 1
    assert str(foreign.cwd / "deployments") in done.stderr
    assert done.stderr.count("\n") == 2

    done = foreign.run("python", "-P", "-m", "nanochat_flows", "plan", "tiny", "--json")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_package_that_was_not_installed_is_named(wheel: Installed, tmp_path: Path) -> None:
    (packages,) = wheel.bin.parent.glob("lib/python*/site-packages")
    copy = tmp_path / "packages"
    copy.mkdir()
    for name in ("nanochat_flows", "deployments"):
        shutil.copytree(packages / name, copy / name)
    done = wheel.run("python", "-I", "-S", "-c", START, str(copy))
    assert done.stderr.splitlines()[0] == f"error: the package `flows` is missing in {copy}"


START = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from nanochat_flows.__main__ import main
sys.exit(main())
"""
