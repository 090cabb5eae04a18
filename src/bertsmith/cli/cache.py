"""`bertsmith cache`: what runs keep for later ones, and how to be rid of it."""

import json
from typing import Annotated, get_args

from typer import Option, echo

from bertsmith.core.cache import LIMIT, Kind, cache_root, cached_files, remove, size_limit
from bertsmith.core.wording import counted


def cache(
    clear: Annotated[bool, Option("--clear", help="Remove all of it; later runs compute it again.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print JSON, for machines.")] = False,
) -> None:
    """Show how much is kept between runs, and remove it.

    Encoded texts, the states of frozen encoders and the scores of teachers are kept in ~/.cache/bertsmith (or
    $XDG_CACHE_HOME/bertsmith), so that a second run starts at once. Above 20 GB ($BERTSMITH_CACHE_GB) the
    files that were not used for longest are removed.

    Example: bertsmith cache

    Example: bertsmith cache --clear
    """
    files, limit = cached_files(), size_limit()
    sizes = {kind: [each.bytes for each in files if each.kind == kind] for kind in get_args(Kind)}
    if clear:
        for each in files:
            remove(each)
    if as_json:
        kinds = {kind: {"files": len(some), "bytes": sum(some)} for kind, some in sizes.items()}
        echo(json.dumps({"folder": str(cache_root()), "limit_bytes": limit, "cleared": clear, **kinds}))
        return
    echo(f"{cache_root()}{' was cleared' if clear else ''}")
    for kind, of_kind in sizes.items():
        echo(f"  {kind:<14}  {counted(len(of_kind), 'file'):>12}  {sum(of_kind) / 1e6:10,.1f} MB")
    if not clear:
        echo(f"limit {limit / 1e9:g} GB ({LIMIT}); bertsmith cache --clear removes all of it")
