"""The documents' examples are run, not believed."""

from __future__ import annotations

import re

import pytest
from conftest import ROOT

from deepseek_ft import ConfigError, load_config
from deepseek_ft.config import ChatConfig, SourceConfig, known_keys
from deepseek_ft.data.chat import FORMS
from deepseek_ft.data.view import first_rows
from deepseek_ft.run import open_data

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
def test_an_example_is_what_its_heading_says(form, tmp_path, cache, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.json").write_text(EXAMPLES[form], encoding="utf-8")
    config = load_config("quickstart", ["data.train=[{source: files, path: rows.json}]", "data.eval=[]"])
    encoder, corpora = open_data(config, cache, ["train"])
    if form == "infill":
        with pytest.raises(ConfigError, match="fim"):  # it needs the tokens of DeepSeek-Coder
            list(first_rows(corpora["train"][0], encoder, config.data, 9))
        return
    rows = list(first_rows(corpora["train"][0], encoder, config.data, 9))
    assert {row["form"] for row in rows} == {form} and len(rows) == EXAMPLES[form].count('\n{"') + 1
    assert all(row["targets"] > 0 for row in rows)
