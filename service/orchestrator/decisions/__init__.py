"""Pure decisions: admission, fair share, backfill, several clusters, and the next step of an attempt.

Values in, values out: no clock, no database, no Ray, no asyncio. May import service.spec, service.settings.settings' names
and worker.contract's reasons.
"""
