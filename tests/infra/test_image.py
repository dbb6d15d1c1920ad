"""The image, as far as it can be built without a container engine: its steps run here, in a fresh environment."""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
STEPS = re.sub(r"\\\n", " ", (ROOT / "infra" / "Dockerfile").read_text("utf-8"))


def instructions(name: str) -> list[str]:
    """Return the arguments of every such instruction of the Dockerfile, in order."""
    return [line.split(maxsplit=1)[1] for line in STEPS.splitlines() if line.startswith(f"{name} ")]


def copied() -> list[str]:
    """Return what the build copies from the checkout."""
    return [source for line in instructions("COPY") if not line.startswith("--from") for source in line.split()[:-1]]


def in_context(path: str) -> bool:
    """Whether .dockerignore lets the builder see a path: the last pattern that matches it or a folder of it decides."""
    visible = True
    for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines():
        pattern = line.removeprefix("!").removeprefix("**/")
        if not line or line.startswith("#"):
            continue
        parts = [path, *(str(folder) for folder in Path(path).parents), Path(path).name]
        if any(fnmatch.fnmatch(part, pattern) for part in parts):
            visible = line.startswith("!")
    return visible


def test_everything_copied_is_there_and_visible() -> None:
    """Each COPY finds its source in the checkout and in the build context."""
    for source in copied():
        assert (ROOT / source).exists(), source
        assert in_context(source), source


@pytest.mark.parametrize(
    "path", ["infra/secrets/postgres_password", ".git/config", ".venv/bin/python", "infra/__pycache__/setup.pyc"]
)
def test_secrets_and_leftovers_stay_outside(path: str) -> None:
    """The build context holds no credential, no history and no environment of this machine."""
    assert not in_context(path)


def test_the_image_is_pinned_and_not_root() -> None:
    """The base is named by digest, every stage starts from it, and the last user is not root."""
    base = instructions("ARG")[0]
    assert re.fullmatch(r"PYTHON_IMAGE=python:3\.11[\w.-]*@sha256:[0-9a-f]{64}", base)
    assert all(stage.startswith("${PYTHON_IMAGE}") for stage in instructions("FROM"))
    assert int(instructions("USER")[-1].split(":")[0]) >= 1000


def test_entry_point_and_build_scripts_exist() -> None:
    """The entry point is a module the image copies, and each script of a RUN step can be executed."""
    assert 'ENTRYPOINT ["python", "-m", "infra.entrypoint"]' in STEPS
    assert "infra/entrypoint.py" in copied()
    scripts = [line.split()[0] for line in instructions("RUN") if line.startswith("infra/")]
    assert scripts == ["infra/install-image"] * 2
    assert (ROOT / scripts[0]).stat().st_mode & 0o111


def test_every_dependency_has_a_tested_version() -> None:
    """What the image and the tests install is pinned in constraints.txt, within the bounds of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    tested = {canonicalize_name(name): version for name, version in pinned.items()}
    wanted = [
        *project["dependencies"],
        *(item for extra in project["optional-dependencies"].values() for item in extra),
    ]
    for requirement in map(Requirement, wanted):
        assert tested[canonicalize_name(requirement.name)] in requirement.specifier, str(requirement)
    assert not [version for version in tested.values() if "+" in version]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment after the image's `package` step, with the dependencies of this one in sight."""
    folder = tmp_path_factory.mktemp("image") / "venv"
    venv.create(folder, with_pip=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    # A .pth line adds a folder to the path without reading the .pth files in it: our editable install stays out.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    step = [str(ROOT / "infra" / "install-image"), "package", str(folder)]
    done = subprocess.run(step, capture_output=True, text=True, check=False, timeout=150)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_package_step_installs_a_working_library(environment: Path) -> None:
    """The library is imported from the new environment, with its console script, and loads no torch."""
    code = "import sys, torchrelay, torchrelay.config; print(torchrelay.__file__); print('torch' in sys.modules)"
    python = [str(environment / "bin" / "python"), "-I", "-c", code]
    shown = subprocess.run(
        python, cwd=environment, capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()
    assert Path(shown[0]).is_relative_to(environment)
    assert shown[1] == "False"
    assert (environment / "bin" / "torchrelay").exists()


def test_an_unknown_step_is_refused(tmp_path: Path) -> None:
    """A typo in the Dockerfile fails the build."""
    done = subprocess.run(
        [str(ROOT / "infra" / "install-image"), "pakage", str(tmp_path)], capture_output=True, check=False
    )
    assert done.returncode == 64


def test_the_wheel_holds_the_library_and_nothing_else(tmp_path: Path) -> None:
    """One top-level package, typed, with its licence; no tests, no flows, no infrastructure."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, capture_output=True, check=True, timeout=60)
    names = zipfile.ZipFile(next(tmp_path.glob("torchrelay-*.whl"))).namelist()
    folders = {name.split("/")[0] for name in names}
    assert {name for name in folders if not name.endswith(".dist-info")} == {"torchrelay"}
    assert "torchrelay/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
