"""Every model of the table, by name."""

from __future__ import annotations

from tests.benchmarks.models import denoisers, language, mixed, networks, pictures
from tests.benchmarks.models.entry import Entry

ENTRIES: dict[str, Entry] = {
    entry.name: entry for part in (language, mixed, pictures, networks, denoisers) for entry in part.ENTRIES
}
