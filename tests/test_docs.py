"""The documents' examples are run, not believed."""

from __future__ import annotations

import json
import re

import pytest
from conftest import ROOT, cli

from deepseek_ft.config import ChatConfig, SourceConfig, known_keys
from deepseek_ft.data.chat import FORMS

TEXT = (ROOT / "docs/data.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"\n\*\*`(\w+)`\*\*(?:(?!\n\*\*`).)*?```jsonl\n(.*?)```", TEXT, re.DOTALL))


def choices(config: type, name: str) -> tuple[str, ...]:
    return config.__dataclass_fields__[name].metadata["choices"]


def test_every_format_and_form_is_explained():
    assert set(EXAMPLES) | {"code"} == set(choices(SourceConfig, "format")) - {"auto"}
    named = set(re.findall(r"^\| `(\w+)` \|", TEXT, re.M))
    assert named == set(choices(ChatConfig, "form")) - {"auto"} == set(FORMS) | {"template"}


def test_every_key_that_it_names_is_one():
    for key in re.findall(r"`(data\.[a-z_.]+)[=:` ]", TEXT):
        assert key in known_keys(), key


@pytest.mark.parametrize("form", EXAMPLES)
def test_an_example_is_what_its_heading_says(form, tmp_path):
    (tmp_path / "rows.json").write_text(EXAMPLES[form], encoding="utf-8")
    words = ("data.train=[{source: files, path: rows.json}]", "data.eval=[]")
    if form == "infill":  # needs the tokens of DeepSeek-Coder
        done = cli("data", "show", "quickstart", *words, cwd=tmp_path)
        assert done.returncode == 2 and "fim" in done.stdout
        return
    done = cli("data", "show", "quickstart", *words, "--json", "-n", "9", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    rows = json.loads(done.stdout[done.stdout.index("\n[") :])
    assert {row["form"] for row in rows} == {form} and len(rows) == EXAMPLES[form].count('\n{"') + 1
    assert all(row["targets"] > 0 for row in rows)
