"""The house is found by names: no two files share one, except where they are the same thing in two rooms."""

from collections import defaultdict
from pathlib import Path

import bertsmith

SOURCE = Path(bertsmith.__file__).parent
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
