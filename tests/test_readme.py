"""What the READMEs promise: every command parses or runs, both languages say the same, every name exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from conftest import BIN, ROOT, cli, run

from deepseek_ft import list_recipes, load_config
from deepseek_ft.cli import _parser
from deepseek_ft.config import KNOWN_SOURCES, OptimConfig
from deepseek_ft.strategies import STRATEGIES

READMES = ["README.md", "README.zh-CN.md"]


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text(name), re.DOTALL)


def commands() -> list[str]:
    return [line for block in blocks("README.md", "bash") for line in block.strip().split("\n")]


def test_both_languages_have_the_same_code_and_tables():
    for language in ("bash", "python"):
        assert blocks(READMES[0], language) == blocks(READMES[1], language)
    names = [re.findall(r"^\| (`[^|]*) \|", text(name).replace("、", ", "), re.M) for name in READMES]
    assert names[0] == names[1] and len(names[0]) > 8


@pytest.mark.parametrize("name", READMES)
def test_every_recipe_strategy_source_and_schedule_is_named(name):
    found = set(re.findall(r"`([^`\n]+)`", text(name)))
    schedules = {f.metadata["choices"] for f in OptimConfig.__dataclass_fields__.values() if "choices" in f.metadata}
    for known in (list_recipes(), STRATEGIES, KNOWN_SOURCES, next(c for c in schedules if "cosine" in c)):
        assert not set(known) - found


@pytest.mark.parametrize("command", commands())
def test_every_command_is_one(command, tmp_path):
    words = shlex.split(command)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", text("Makefile"), re.M)
    elif words[0] == "deepseek-ft":
        arguments = _parser().parse_args([w for w in words[1:]])
        if getattr(arguments, "recipe", None):  # doctor takes none
            load_config(arguments.recipe, arguments.overrides)
    else:
        assert words[0] == "deepspeed" and (ROOT / next(w for w in words if w.endswith(".py"))).is_file()


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings: lower case, punctuation left out, spaces as hyphens."""
    headings = re.findall(r"^#+ +(.+)$", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", sorted([*ROOT.glob("*.md"), *ROOT.glob("*/*.md")]), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://")):
            path, _, anchor = target.partition("#")
            linked = page.parent / path if path else page
            assert linked.exists(), target
            assert not anchor or anchor in anchors(linked), target


def test_quick_start_of_the_readme_in_python(tmp_path):
    """The Python block, word for word, with fewer steps so that it takes a moment."""
    (code,) = blocks("README.md", "python")
    assert '"max_steps": 20' in code
    done = run(BIN / "python", "-c", code.replace("20", "2"), cwd=tmp_path)
    assert done.returncode == 0 and "runs/quickstart/model" in done.stdout.splitlines()[-1], done.stdout[-2000:]


def test_the_saved_config_command(tmp_path):
    saved = tmp_path / "config.yaml"
    from deepseek_ft.config import to_yaml

    saved.write_text(to_yaml(load_config("quickstart")))
    shown = cli("recipes", saved, cwd=tmp_path)
    assert shown.returncode == 0 and shown.stdout == saved.read_text()
