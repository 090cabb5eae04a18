"""`bertsmith look`: what goes on inside a model, as tables and pictures."""

from typer import Typer

from bertsmith.cli.look.coref import coref
from bertsmith.cli.look.heads import heads
from bertsmith.cli.look.surface import surface

look = Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Look inside a model: what its heads attend to, and what its layers know.",
    epilog="Start here: bertsmith look surface --input texts.txt --out look/",
)
look.command("surface")(surface)
look.command("heads")(heads)
look.command("coref")(coref)
