"""`python -m bertsmith` is the `bertsmith` command."""

from bertsmith.cli.app import main

main()
