"""One line in the log when something goes away and one when it is back, however often it is asked meanwhile."""

from __future__ import annotations

import logging
import time


class Outage:
    """`away` at every failure, `back` at every success; `what` is the thing, as the log names it."""

    def __init__(self, what: str, logger: logging.Logger) -> None:
        self._what, self._logger = what, logger
        self._since: float | None = None

    def away(self, error: BaseException | str) -> None:
        if self._since is None:
            self._since = time.monotonic()
            said = " ".join(str(error).split())[:300] or type(error).__name__
            self._logger.error("%s does not answer: %s", self._what, said)

    def back(self) -> None:
        if self._since is not None:
            self._logger.info("%s is back after %.1f s", self._what, time.monotonic() - self._since)
            self._since = None
