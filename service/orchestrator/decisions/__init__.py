"""Pure decisions: admission policy, fair share, backfill, clusters, and what to do about an attempt.

Values in, values out: no clock, no database, no Ray, no asyncio. May import service.spec, service.settings.settings' names
and worker.contract's reasons.
"""
