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
from shardline.config import iter_fields, load_config
from shardline.parallel.schedules import make_schedule
from shardline.parallel.tensor import STYLES
from shardline.planning.moments import bubble

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    module.name for module in pkgutil.walk_packages(shardline.__path__, "shardline.") if "__main__" not in module.name
)


def code_blocks(text: str) -> str:
    return "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL))


def commands() -> list[str]:
    """What a page tells its reader to type; `shardline VERB: ...` is what the program says."""
    pages = (ROOT / "README.md", ROOT / "README.zh.md", *(ROOT / "docs").glob("*.md"))
    lines = [line.removeprefix("$ ") for page in pages for line in code_blocks_of(page)]
    told = re.compile(r"shardline \w+ |shardline \w+$")
    return sorted({line.partition("#")[0].strip() for line in lines if told.match(line)})


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


TRAINING = (ROOT / "docs" / "training.md").read_text()


def test_the_training_page_has_every_key_and_every_style():
    for name in (name for name, _ in iter_fields() if name.startswith("parallel.")):
        assert f"| `{name}` |" in TRAINING, name
    rows = [line for line in TRAINING.splitlines() if line.startswith("| `")]
    for pattern, style in STYLES:
        assert any(f"`{pattern}`" in row and f" {style} " in row for row in rows), pattern


def test_the_training_page_s_schedules_are_those_that_run():
    rows = re.findall(r"^\| `(\w+)` \| (\d) \| ([\d.]+) % \| (.*) \|$", TRAINING, flags=re.MULTILINE)
    assert {row[0] for row in rows} == {"gpipe", "1f1b", "interleaved", "zero_bubble_v"}
    for name, stages, idle, in_flight in rows:
        shape = {"num_ranks": 4, "num_micro_batches": 8, "stages_per_rank": int(stages)}
        assert bubble(name, **shape) * 100 == float(idle)
        schedule = make_schedule(name, **shape)
        alive = [schedule.max_in_flight(rank) / int(stages) for rank in range(4)]
        assert alive == [float(count) for count in in_flight.split(", ")]
