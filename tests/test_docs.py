"""The documentation names what there is: links, files, commands, flags, settings."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from scripts import settings_page
from solrl import cli
from solrl.settings import setting_types, shipped_configs

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*DOCS, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def commands(page: Path) -> list[list[str]]:
    """The words of every `solrl` command in a shell or indented block of a page, comments left out."""
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL) + re.findall(r"(?:^ {4,}\S.*\n)+", text, re.MULTILINE)
    found = []
    for line in "\n".join(blocks).splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # prose
            continue
        if "solrl" in words[:6] and words.index("solrl") + 1 < len(words):
            found.append(words[words.index("solrl") + 1 :])
    return found


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub and MyST name them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_setting_is_on_its_page_as_it_is_now() -> None:
    assert settings_page.PAGE.read_text() == settings_page.page(), "run python scripts/settings_page.py"
    for key, _ in setting_types():
        assert f"**`{key}`**" in settings_page.page()


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" not in target:
            name, _, anchor = target.partition("#")
            file = page.parent / name if name else page
            assert file.is_file(), target
            assert not anchor or anchor in anchors(file), target


@pages
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(
        r"`((?:solrl|rewards|scripts|configs|tests|examples|benchmarks|docs)/[\w./]*)`", page.read_text()
    )
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


@pages
def test_commands_and_flags_exist(page: Path) -> None:
    settings, source = {key for key, _ in setting_types()}, (ROOT / "solrl" / "cli.py").read_text()
    for words in commands(page):
        assert words[0] in cli.COMMANDS, words
        if words[0] in ("train", "plan") and words[1][0] not in ".-" and words[1].isidentifier() and words[1].islower():
            assert words[1] in shipped_configs(), words
        for word in words[1:]:
            if word.startswith("--"):
                key = word[2:].partition("=")[0]
                is_option = key.startswith(("reward.options.", "train.objective_options."))
                assert key in settings or is_option or f'"--{key}"' in source, (words, word)


def test_the_pages_hold_commands_at_all() -> None:
    assert sum(len(commands(page)) for page in PAGES) > 20


def test_every_page_is_in_the_table_of_contents() -> None:
    listed = re.search(r"```\{toctree\}\n:hidden:\n\n(.*?)```", (ROOT / "docs" / "index.md").read_text(), re.DOTALL)
    assert listed is not None
    assert sorted([*listed[1].split(), "index"]) == [page.stem for page in DOCS]


def test_what_is_included_exists() -> None:
    for page in DOCS:
        for target in re.findall(r"\{literalinclude\} (\S+)", page.read_text()):
            assert (page.parent / target).is_file(), target
