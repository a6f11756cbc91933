"""Runs the `slotline` command as `python -m service.cli`."""

from service.cli.main import main

main()
