"""`bertsmith look`: study the inside of a model with tables and pictures."""

from typer import Typer

from bertsmith.cli.look.clusters import clusters
from bertsmith.cli.look.coref import coref
from bertsmith.cli.look.direction import direction
from bertsmith.cli.look.heads import heads
from bertsmith.cli.look.layers import changes, layers
from bertsmith.cli.look.probe import probe
from bertsmith.cli.look.surface import surface
from bertsmith.cli.look.views import attention, senses, words
from bertsmith.cli.verb import Verb, Verbs

look = Typer(
    cls=Verbs,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Look inside a model: what its heads attend to, and what its layers know.",
    epilog="Start here: bertsmith look surface --input texts.txt --out look/",
)
look.command("surface", cls=Verb)(surface)
look.command("heads", cls=Verb)(heads)
look.command("coref", cls=Verb)(coref)
look.command("clusters", cls=Verb)(clusters)
look.command("probe", cls=Verb)(probe)
look.command("attention", cls=Verb)(attention)
look.command("senses", cls=Verb)(senses)
look.command("layers", cls=Verb)(layers)
look.command("changes", cls=Verb)(changes)
look.command("words", cls=Verb)(words)
look.command("direction", cls=Verb)(direction)
