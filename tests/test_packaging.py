"""Recipes and DeepSpeed files are found from any directory: from a checkout, an editable install and a wheel."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT, clean_environment, run

from deepseek_ft import list_recipes

DEPENDENCIES = sysconfig.get_paths()["purelib"]


def environment_beside(folder: Path) -> Path:
    """A fresh virtual environment that sees the installed dependencies, but not this checkout."""
    venv.create(folder, with_pip=False)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "dependencies.pth").write_text(DEPENDENCIES + "\n")
    return folder / "bin" / "python"


def pip_install(python: Path, *words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-build-isolation",
                           "--no-index", *words], capture_output=True, text=True, cwd=ROOT, env=clean_environment())  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a copy: building leaves folders behind
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "__pycache__"))
    done = run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, source, cwd=folder)
    assert done.returncode == 0, done.stdout[-3000:]
    return next(folder.glob("*.whl"))


def check(python: Path | str, cwd: Path, where: Path | None = None) -> Path:
    env = clean_environment()
    env.pop("PYTHONPATH", None)
    if where is not None:
        env["PYTHONPATH"] = str(where)
    code = "import deepseek_ft, json; print(json.dumps([deepseek_ft.__file__, deepseek_ft.list_recipes()]))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, cwd=cwd, env=env)
    assert done.returncode == 0, done.stderr
    home, recipes = json.loads(done.stdout)
    assert recipes == list_recipes() and len(recipes) >= 5
    trained = run(python, "-m", "deepseek_ft", "train", "quickstart", "train.max_steps=1", "strategy=single", "deepspeed=null",
                  "data.train.0.max_documents=20", "data.eval.0.max_documents=1", cwd=cwd, env=env)  # fmt: skip
    assert trained.returncode == 0, trained.stdout[-3000:]
    return Path(home)


def test_from_a_checkout(tmp_path):
    home = check(sys.executable, tmp_path, where=ROOT)
    assert home.is_relative_to(ROOT)


def test_from_an_editable_install(tmp_path):
    python = environment_beside(tmp_path / "venv")
    pip_install(python, "--editable", str(ROOT))
    assert check(python, tmp_path).is_relative_to(ROOT)


def test_from_a_wheel(wheel, tmp_path):
    python = environment_beside(tmp_path / "venv")
    pip_install(python, str(wheel))
    assert check(python, tmp_path).is_relative_to(tmp_path)


def test_what_is_in_the_wheel(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for path in [*ROOT.glob("recipes/**/*.yaml"), *ROOT.glob("ds_configs/*.json"), *ROOT.glob("deepseek_ft/**/*.py")]:
        inside = path.relative_to(ROOT).as_posix()
        assert (inside if inside.startswith("deepseek_ft") else f"deepseek_ft/{inside}") in names
    assert not [n for n in names if n.startswith(("tests", "examples", "recipes", "ds_configs"))]
    assert any(n.endswith("licenses/LICENSE") for n in names)
