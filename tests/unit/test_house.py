"""Rules of the house: no two files share a name, except the same thing in two rooms; tests assert.

A docstring begins with a verb, a noun or "True if", so that it can be read alone.
"""

import ast
import re
from collections import defaultdict
from pathlib import Path

import bertsmith

SOURCE = Path(bertsmith.__file__).parent
TESTS = Path(__file__).parents[1]
SAME_THING = {
    "__init__": "a package",
    "app": "the root of the command line, and of the server",
    "registry": "the one list of a family's members: of architectures, of kinds of tasks",
    "routes": "the routes of an API",
}


def test_no_two_files_share_a_name_with_different_meanings():
    rooms: dict[str, list[str]] = defaultdict(list)
    for file in SOURCE.rglob("*.py"):
        rooms[file.stem].append(file.parent.relative_to(SOURCE).as_posix())
    # A verb of the command line has the name of what it runs.
    verbs = {"cli", "cli/look"}
    shared = {name: set(places) - verbs for name, places in rooms.items() if len(places) > 1}
    clashes = {
        name: sorted(rooms[name])
        for name, places in shared.items()
        if name not in SAME_THING and len(places) > 1
    }
    assert clashes == {}


def asserts(node):
    """True if a function has an assertion, or calls what raises if something is wrong."""
    if isinstance(node, ast.Assert):
        return True
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in ("raises", "warns", "fail", "expect") or name.startswith(("assert", "check")):
            return True
    return any(asserts(each) for each in ast.iter_child_nodes(node))


def test_every_test_asserts_something():
    functions = [
        (f"{file.relative_to(TESTS)}:{node.lineno}", node)
        for file in TESTS.rglob("test_*.py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    ]
    assert len(functions) > 2000
    assert [place for place, node in functions if not asserts(node)] == []


def test_no_message_below_the_doors_names_an_option():
    found = [
        f"{file.relative_to(SOURCE)}:{node.lineno}: {node.value}"
        for file in SOURCE.rglob("*.py")
        if file.relative_to(SOURCE).parts[0] not in ("cli", "serve")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count("\n") == 0
        if re.search(r"(^|[\s(])--[a-z]", node.value) and not COMMAND.search(node.value)
    ]
    assert found == []


COMMAND = re.compile(r"bertsmith [a-z]|torchrun|--out FOLDER$|--freeze_pos_embs")
"""A whole command, of ours or of another tool, or the option of a published script."""
NO_BEGINNING = re.compile(r"(What|Whether|Where|How|Of|So many)\b")


def test_no_docstring_begins_with_a_clause_or_a_fragment():
    found = [
        f"{file.relative_to(SOURCE)}:{node.lineno}: {node.value.value.splitlines()[0]}"
        for file in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str) and NO_BEGINNING.match(node.value.value)
    ]
    assert found == []
