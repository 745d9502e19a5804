"""The wheel: what is in it, and that a job loads from it, away from the repository."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from tests.wheels import build

ROOT = Path(__file__).parents[2]
ROOMS = ("titan", "plugins", "planner", "inference", "testing")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(build(tmp_path_factory.mktemp("wheel")))


def test_holds_every_source_config_and_vocabulary(wheel: zipfile.ZipFile) -> None:
    wanted = {
        (Path(name) / file.relative_to(ROOT / folder)).as_posix()
        for name, folder in (("titan", "titan"), *((f"titan/{folder}", folder) for folder in (*ROOMS[1:], "configs")))
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert {"titan/py.typed", "titan/configs/quickstart.toml", "titan/plugins/models/gpt.py"} <= wanted
    assert wanted <= set(wheel.namelist())


def test_nothing_generic_lands_in_site_packages(wheel: zipfile.ZipFile) -> None:
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"titan"}


def test_metadata(wheel: zipfile.ZipFile) -> None:
    [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = message_from_bytes(wheel.read(name))
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Requires-Python"] == "<3.14,>=3.11"
    extras = set(metadata.get_all("Provides-Extra") or ())
    assert {"dev", "float8", "hf", "tune", "wandb", "plot"} <= extras


def test_a_job_loads_from_it(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "site")
    program = """
import titan.plugins, titan.config as c
from titan.packages import install
print(titan.__file__, c.load_job(None).run.name, install("tune"), sep="\\n")
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    said = subprocess.check_output([sys.executable, "-c", program], cwd=tmp_path, env=environment, text=True)
    place, job, command = said.splitlines()
    assert (place, job) == (str(tmp_path / "site" / "titan" / "__init__.py"), "quickstart")
    assert shlex.split(command) == [sys.executable, "-m", "pip", "install", "titan-train[tune]"]


EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("extra", sorted(EXTRAS.keys() - {"dev"}))
def test_each_extra_is_named_where_it_lacks_and_has_a_test(extra: str) -> None:
    code = "".join(file.read_text() for folder in ROOMS for file in (ROOT / folder).rglob("*.py"))
    assert re.search(rf"""install\(["']{extra}["']\)""", code), f"no message names the extra {extra}"
    tests = "".join(file.read_text() for file in (ROOT / "tests").rglob("*.py"))
    packages = [re.split(r"[<>=]", requirement)[0] for requirement in EXTRAS[extra]]
    assert all(
        re.search(rf"""(importorskip\(["']|import |from |find_spec\(["']){name}\b""", tests) for name in packages
    )


def test_nothing_tells_to_install_the_package_of_somebody_else() -> None:
    """`titan` on the package index is not this one."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    pages = [ROOT / name for name in listed if name.endswith((".py", ".md", ".sh", ".toml"))]
    told = re.compile(r"(pip install|uv add) [^`\n]*(?<![/\w-])titan(?![-\w/])")
    assert not [page for page in pages if page != Path(__file__) and told.search(page.read_text())]
