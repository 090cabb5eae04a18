"""`bertsmith look`: study the inside of a model with tables and pictures."""

from bertsmith.cli.look.clusters import clusters
from bertsmith.cli.look.coref import coref
from bertsmith.cli.look.direction import direction
from bertsmith.cli.look.heads import heads
from bertsmith.cli.look.layers import changes, layers
from bertsmith.cli.look.probe import probe
from bertsmith.cli.look.surface import surface
from bertsmith.cli.look.views import attention, senses, words
from bertsmith.cli.verb import App

look = App(
    help="Look inside a model: what its heads attend to, and what its layers know.",
    epilog="Start here: bertsmith look surface --input texts.txt --out look/",
)
look.command("surface")(surface)
look.command("heads")(heads)
look.command("coref")(coref)
look.command("clusters")(clusters)
look.command("probe")(probe)
look.command("attention")(attention)
look.command("senses")(senses)
look.command("layers")(layers)
look.command("changes")(changes)
look.command("words")(words)
look.command("direction")(direction)
