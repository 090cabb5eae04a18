"""The documents keep their word: code blocks run, links point somewhere."""

import re
from pathlib import Path

import pytest

from tests.tiny_runs import tiny_store
from tests.toy_folder import write_toy_folder

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("bench/*.md")])
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\((?!http|#|mailto:)([^)#]+)")

named = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


@named
def test_every_python_block_runs_from_top_to_bottom(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_toy_folder(tmp_path / "path" / "to" / "model-folder")
    tiny_store(tmp_path / "tiny").folder.rename(tmp_path / "path" / "to" / "store")
    names: dict = {}
    blocks = PYTHON.findall(text := document.read_text())
    assert len(blocks) == text.count("```python")  # none is passed over
    for block in blocks:
        exec(compile(block, document.name, "exec"), names)


@named
def test_every_relative_link_points_to_a_file(document):
    for target in LINK.findall(document.read_text()):
        assert (document.parent / target).exists(), target


def test_the_readme_has_code_to_run():
    assert PYTHON.findall((ROOT / "README.md").read_text())


def test_the_glossary_has_each_word_once_and_names_files_that_exist():
    rows = re.findall(
        r"(?m)^\| ([^|]+) \| [^|]+ \| `([^`]+)` \|$", (ROOT / "docs" / "glossary.md").read_text()
    )
    words = [word for word, _ in rows]
    assert len(words) >= 80 and len(set(words)) == len(words)
    assert [place for _, place in rows if not (ROOT / "src" / "bertsmith" / place).is_file()] == []


def test_the_benchmarks_are_listed_and_no_document_names_one_that_is_not_there():
    scripts = {path.name for path in (ROOT / "bench").glob("*.py")}
    listed = set(re.findall(r"`(\w+\.py)`", (ROOT / "bench" / "README.md").read_text()))
    assert scripts - listed == set()
    named_ones = {script for path in DOCUMENTS for script in re.findall(r"bench/(\w+\.py)", path.read_text())}
    assert named_ones - scripts == set()
