"""The README's commands exist as written, the generated pages are current, and every `__all__` tells the truth."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import pkgutil
import re
import shlex
from pathlib import Path

import pytest

import shardline
from shardline.cli.main import VERBS
from shardline.cli.overrides import split_overrides
from shardline.config import load_config

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    module.name for module in pkgutil.walk_packages(shardline.__path__, "shardline.") if "__main__" not in module.name
)


def code_blocks(text: str) -> str:
    return "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL))


def commands() -> list[str]:
    lines = [line for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")) for line in code_blocks_of(page)]
    return sorted({line.partition("#")[0].strip() for line in lines if line.startswith("shardline ")})


def code_blocks_of(page: Path) -> list[str]:
    return [line.strip() for line in code_blocks(page.read_text()).splitlines()]


def test_there_are_commands_to_check():
    assert len(commands()) > 10


@pytest.mark.parametrize("command", commands())
def test_documented_commands_parse(command):
    _, verb, *words = shlex.split(command.partition(" > ")[0].replace("[", "").replace("]", "").replace("...", ""))
    if verb in ("VERB",):
        return
    assert verb in VERBS, command
    module = importlib.import_module(f"shardline.cli.{verb}")
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--json", action="store_true")
    module.add_arguments(parser)
    overrides: list[str] = []
    if getattr(module, "TAKES_OVERRIDES", False):
        words, overrides = split_overrides(words)
    _, unknown = parser.parse_known_args(words)
    assert not unknown, command
    load_config(None, [word for word in overrides if word not in ("--section.field", "VALUE")])


def test_make_targets_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"^make ([\w-]+)", code_blocks((ROOT / "README.md").read_text()), flags=re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_links_between_documents_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "README.zh.md", *(ROOT / "docs").rglob("*.md")):
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_config_page_is_current():
    path = ROOT / "docs" / "generate.py"
    spec = importlib.util.spec_from_file_location("generate", path)
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert (ROOT / "docs" / "config.md").read_text() == generate.config_page(), "run `make docs`"


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_the_verbs_page_has_every_option(verb):
    """Options rather than the whole text: argparse words its usage differently in each Python."""
    page = (ROOT / "docs" / "cli.md").read_text()
    section = page.partition(f"## {verb}\n")[2].partition("\n## ")[0]
    parser = argparse.ArgumentParser()
    module = importlib.import_module(f"shardline.cli.{verb}")
    module.add_arguments(parser)
    for option in re.findall(r"--[a-z][\w-]+", parser.format_help()):
        assert option in section, f"{option}: run `make docs`"
    for line in module.__doc__.strip().splitlines():
        assert line in section, "run `make docs`"


@pytest.mark.parametrize("name", MODULES)
def test_exports_exist_and_modules_say_what_they_are_for(name):
    module = importlib.import_module(name)
    exports = getattr(module, "__all__", [])
    assert all(hasattr(module, export) for export in exports)
    assert len(set(exports)) == len(exports)
    assert module.__doc__ or name.count(".") == 1, "a module says what it is for"
