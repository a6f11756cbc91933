"""`python -m service.cli` is `slotline`."""

from service.cli import main

main()
