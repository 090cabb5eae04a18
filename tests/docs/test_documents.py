"""The documents keep their word: code blocks run, links point somewhere."""

import re
import shlex
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import yaml

from bertsmith.cli.app import app
from tests.command_line import COMMAND_OF, bertsmith
from tests.tiny_runs import tiny_store
from tests.toy_folder import write_toy_folder

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/*.md")])
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
CONSOLE = re.compile(r"(?ms)^```(?:console|bash|sh|text)\n(.*?)^```$")
LINK = re.compile(r"\]\((?!http|mailto:)([^)#]*)(?:#([^)]+))?\)")
HEADING = re.compile(r"(?m)^#+ (.+)$")
FENCED = re.compile(r"(?ms)^```.*?^```$")
SPEC = spec_from_file_location("pictures", ROOT / "bench" / "pictures.py")
pictures = module_from_spec(SPEC)
SPEC.loader.exec_module(pictures)

named = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


@named
def test_every_python_block_runs_from_top_to_bottom(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names: dict = {}
    blocks = PYTHON.findall(text := document.read_text())
    assert len(blocks) == text.count("```python")  # none is passed over
    if blocks:
        write_toy_folder(tmp_path / "path" / "to" / "model-folder")
        tiny_store(tmp_path / "tiny").folder.rename(tmp_path / "path" / "to" / "store")
    for block in blocks:
        exec(compile(block, document.name, "exec"), names)


def anchors(document):
    """The anchors of a document's headings, as the usual host and the docs site name them."""
    plain = re.sub(r"\]\([^)]*\)", "]", FENCED.sub("", document.read_text()))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in HEADING.findall(plain)}


@named
def test_every_relative_link_points_to_a_file_and_to_a_heading_in_it(document):
    for target, anchor in LINK.findall(FENCED.sub("", document.read_text())):
        place = document.parent / target if target else document
        assert place.exists(), target
        assert not anchor or anchor in anchors(place), f"{target}#{anchor}"


@named
def test_every_command_is_one_with_options_that_it_has(document):
    lines = "\n".join(CONSOLE.findall(document.read_text())).replace("\\\n", " ").splitlines()
    for line in lines:
        if not (found := re.match(r"(?:\$ )?bertsmith (.+)", line)):
            continue
        words, command = shlex.split(found[1], comments=True), COMMAND_OF(app)
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        assert not getattr(command, "commands", {}) or not words or words[0].startswith("-"), line
        options = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
        asked = {word.partition("=")[0] for word in words if re.match(r"--\w", word)}
        assert asked - options <= {"--help", "--install-completion", "--version"}, line


def plain(lines):
    """The words of an output: machines differ in last digits, and so in bars and the order of equals."""
    return sorted(re.sub(r"[\d.]+ ?%|[\d.]{4,}|[█▉▊▋▌▍▎▏]+|\s+", " ", line).strip() for line in lines)


@named
def test_commands_print_what_is_shown_below_them(document, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    blocks = CONSOLE.findall(document.read_text())
    for shown in (each for block in blocks for each in pictures.shown_in(block)):
        if shown.runs_on:  # the wheel's tests start a server
            continue
        told = bertsmith(capsys, *shown.words)
        assert told.code == 0, (shown.command, told.err)
        assert plain(shown.told(told.out)) == plain(shown.lines), shown.command


def test_the_readme_is_short_and_has_code_and_outputs_and_small_pictures():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 180
    assert PYTHON.findall(text)
    assert [shown.words[0] for block in CONSOLE.findall(text) for shown in pictures.shown_in(block)] == [
        *("fill", "tag", "serve")
    ]
    assert all(path.stat().st_size <= pictures.LARGEST for path in pictures.PICTURES.glob("*.png"))


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


@pytest.mark.parametrize(
    ("sentence", "code", "besides"),
    [
        (r"- `Exception` is caught in(.*?)\n- ", r"except (?:Base)?Exception\b", ()),
        (
            r"- Only `cli` and `training` read the environment(.*?)\n- ",
            r"os\.environ|getenv",
            ("cli/", "training/"),
        ),
    ],
)
def test_the_architecture_names_all_files_that_make_an_exception_of_a_rule(sentence, code, besides):
    (rule,) = re.findall(sentence, (ROOT / "docs" / "architecture.md").read_text(), re.DOTALL)
    package = ROOT / "src" / "bertsmith"
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if re.search(code, path.read_text())
    }
    assert {each for each in found if not each.startswith(besides or "-")} == set(
        re.findall(r"`(\w[\w/]*\.py)`", rule)
    )


def test_the_site_has_every_document_in_its_navigation():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    told = set(re.findall(r"[\w/-]+\.md", str(site["nav"])))
    assert told == {str(document.relative_to(ROOT)) for document in DOCUMENTS} | {"api/README.md"}
    assert site["strict"]


def test_the_workflow_calls_targets_of_make_on_the_pythons_that_the_package_names():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    called = {
        word for job in jobs.values() for step in job["steps"] for word in make_targets(step.get("run", ""))
    }
    targets = set(re.findall(r"(?m)^([a-z-]+):.*## ", (ROOT / "Makefile").read_text()))
    assert {"test", "docs", "release"} <= called <= targets
    named_pythons = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert [job["strategy"]["matrix"]["python"] for job in jobs.values() if "strategy" in job] == [
        named_pythons
    ] * 2


def make_targets(line):
    return re.findall(r"(?:^|\s)make ([a-z-]+)", line)
