"""Shared fixtures. Everything here is made on the spot or comes with Python: the tests need no network."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from deepseek_ft.ops import missing_for_builds

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: threads that spin would take the cores from the ranks of a test
ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"
BIN = Path(sys.executable).parent
STDLIB = Path(sysconfig.get_paths()["stdlib"])

needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(), reason="needs the real files beside the checkout (../shared/data)"
)


needs_libaio = pytest.mark.skipif(
    bool(missing_for_builds(["async_io"])), reason="DeepSpeed's async_io op cannot be built here: apt-get install libaio-dev"
)


def clean_environment(**more: str) -> dict[str, str]:
    """The environment of a user's shell: no rank variables, no cache of another test session."""
    drop = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "DS_ACCELERATOR")
    return {k: v for k, v in os.environ.items() if k not in drop} | more


def run(
    *words: str | Path, cwd: Path, env: dict[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess:
    """A command as a user would type it; stdout and stderr together in `.stdout`."""
    return subprocess.run(
        [str(w) for w in words], cwd=cwd, env=env or clean_environment(), timeout=timeout, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, encoding="utf-8", errors="replace",
    )  # fmt: skip


def cli(
    *words: str | Path, cwd: Path, env: dict[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess:
    return run(sys.executable, "-m", "deepseek_ft", *words, cwd=cwd, env=env, timeout=timeout)


def corpus_of(
    examples: Callable[[], Iterable] | Iterable, fingerprint: str = "f", label: str = "test", is_code: bool = False
):
    """A corpus of texts or examples; a function is called at each reading."""
    from deepseek_ft.data.formats import Text
    from deepseek_ft.data.sources import Corpus

    def read(start, report):
        for i, example in enumerate(examples() if callable(examples) else examples, start=1):
            if i <= start[1]:
                continue
            report.examples += 1
            report.bad.rows += 1
            yield (0, i), Text(example) if isinstance(example, str) else example

    return Corpus(label, fingerprint, read, is_code=is_code)


def error(call: Callable, *words: str) -> str:
    """The message of the DataError that a call ends in; it holds all these words."""
    from deepseek_ft import DataError

    with pytest.raises(DataError) as caught:
        call()
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))
    return str(caught.value)


def archive(members: dict[str, bytes], mode: str = "w") -> bytes:
    """A tar of these files."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def train(recipe: str | Path, *overrides: str, cwd: Path, **kwargs) -> dict:
    """Train on the command line; run.json of a run that must have finished."""
    done = cli("train", recipe, *overrides, cwd=cwd, **kwargs)
    assert done.returncode == 0, done.stdout[-4000:]
    return newest_run(cwd)


def newest_run(cwd: Path) -> dict:
    runs = sorted(cwd.glob("runs/*/run.json"), key=lambda p: p.stat().st_mtime)
    return json.loads(runs[-1].read_text()) | {"folder": runs[-1].parent}


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory) -> Path:
    """One token and preset cache for all tests; DeepSpeed's compiled ops stay in the user's own cache."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["DEEPSEEK_FT_CACHE"] = str(folder)
    return folder


@pytest.fixture(scope="session")
def code(tmp_path_factory) -> Path:
    """Sixty real source files of Python's standard library."""
    folder = tmp_path_factory.mktemp("code")
    for path in sorted(STDLIB.glob("*.py"))[:60]:
        shutil.copy(path, folder / path.name)
    return folder


@pytest.fixture(scope="session")
def tiny_recipe(tmp_path_factory, code) -> Path:
    """A recipe that trains a tiny model on real code in seconds: 8 steps, global batch 6, fp32."""
    text = f"""
name: tiny
seed: 7
output_dir: runs/${{name}}
model: {{path: preset:tiny-v3, tokenizer: "train:600", gradient_checkpointing: false}}
data:
  path: {code}
  train: [{{source: code, split: train, holdout: 0.1}}]
  eval:  [{{source: code, split: validation, holdout: 0.1, max_documents: 3}}]
  seq_len: 64
optim: {{lr: 5.0e-3, schedule: cosine, warmup_steps: 2}}
train: {{max_steps: 8, micro_batch_size: 2, global_batch_size: 6, precision: fp32, log_steps: 1, eval_steps: null, save_steps: null}}
strategy: zero3
"""
    path = tmp_path_factory.mktemp("recipes") / "tiny.yaml"
    path.write_text(text)
    return path


TABLE: list[str] = []
"""Rows of Markdown that a test leaves, printed at the end."""


def pytest_terminal_summary(terminalreporter):
    for line in TABLE and ["", TABLE[0], *sorted(TABLE[1:])]:
        terminalreporter.write_line(line)
