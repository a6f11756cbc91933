"""Every model of the table, by name."""

from __future__ import annotations

from tests.benchmarks.models import language, pictures
from tests.benchmarks.models.entry import Entry

ENTRIES: dict[str, Entry] = {entry.name: entry for entry in (*language.ENTRIES, *pictures.ENTRIES)}
