"""`bertsmith cache`: show and remove the files that runs keep for later runs."""

from math import isfinite
from typing import Annotated, get_args

from typer import Option, echo

from bertsmith.cli import options
from bertsmith.cli.presenting import print_json
from bertsmith.core.cache import LIMIT, Kind, cache_root, cached_files, remove, size_limit
from bertsmith.core.wording import counted


def cache(
    clear: Annotated[bool, Option("--clear", help="Remove all of it; later runs compute it again.")] = False,
    as_json: options.Json = False,
) -> None:
    """Show how much is kept between runs, and remove it.

    Encoded texts, the states of frozen encoders, the scores of teachers and finished sets of BLiMP are kept
    in ~/.cache/bertsmith (or $XDG_CACHE_HOME/bertsmith), so that a second run starts at once. Above 20 GB
    ($BERTSMITH_CACHE_GB) the files that were not used for longest are removed.

    Example: bertsmith cache

    Example: bertsmith cache --clear
    """
    limit, removed = size_limit(), [each for each in cached_files() if clear and remove(each)]
    files, freed = cached_files(), sum(each.bytes for each in removed)
    sizes = {kind: [each.bytes for each in files if each.kind == kind] for kind in get_args(Kind)}
    if as_json:
        kinds = {kind: {"files": len(some), "bytes": sum(some)} for kind, some in sizes.items()}
        facts = {"folder": str(cache_root()), "limit_bytes": limit if isfinite(limit) else None}
        print_json({**facts, "removed": {"files": len(removed), "bytes": freed}, **kinds})
        return
    if clear:
        echo(f"removed {counted(len(removed), 'file')}, {freed / 1e6:,.1f} MB")
    echo(str(cache_root()))
    for kind, of_kind in sizes.items():
        echo(f"  {kind:<14}  {counted(len(of_kind), 'file'):>12}  {sum(of_kind) / 1e6:10,.1f} MB")
    if not clear:
        echo(f"limit {limit / 1e9:g} GB ({LIMIT}); bertsmith cache --clear removes all of it")
