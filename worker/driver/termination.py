"""How a driver hears that it is to end: SIGTERM, from Ray or from whoever runs the node."""

from __future__ import annotations

import signal


class Termination:
    """SIGTERM: the first one ends the attempt in order, by KeyboardInterrupt; later ones change nothing."""

    def __init__(self) -> None:
        self.asked = False

    def listen(self) -> None:
        """Handle SIGTERM from now on; again after something else took the signal's place."""
        signal.signal(signal.SIGTERM, self._hear)

    def _hear(self, *_: object) -> None:
        if not self.asked:
            self.asked = True
            raise KeyboardInterrupt
