"""The calls of service.client.Client about queues and lists of jobs. A part of it, of no use alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any

from service.api.notification_schemas import DeliveryPage, DeliveryView
from service.api.schemas import JobPage, JobSummary, JobView, QueueList, QueueQuotaView, QueueView
from service.job_states import JobState

_PAGE = 500


class QueueCalls:
    """Calls of a Client, which says how a call is made."""

    _get: Callable[..., Any]
    _call: Callable[..., Any]
    _parsed: Callable[..., Any]

    def jobs(
        self,
        *,
        state: JobState | Sequence[JobState] | None = None,
        queue: str | None = None,
        owner: str | None = None,
        limit: int | None = None,
        name: str | None = None,
        labels: Mapping[str, str | None] = MappingProxyType({}),
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> Iterator[JobSummary]:
        """Jobs, newest first, at most `limit`; a page is asked for when it is needed.

        Those with all of `labels` (None: any value), submitted at `since` or later and before `until` (with zones).
        """
        times = {"since": since and since.isoformat(), "until": until and until.isoformat()}
        having = [key if value is None else f"{key}={value}" for key, value in labels.items()]
        wanted = {"state": state, "queue": queue, "owner": owner, "name": name, "label": having, **times}
        path = "/api/v1/jobs"
        left, token = limit, None
        while left is None or left > 0:
            size = _PAGE if left is None else min(left, _PAGE)
            page = self._get(JobPage, path, limit=size, page_token=token, **wanted)
            yield from page.items
            left = None if left is None else left - len(page.items)
            if (token := page.next_page_token) is None:
                return

    def notifications(self, job_id: str) -> Iterator[DeliveryView]:
        """Who was told of the job's states, and how that went."""
        token = None
        while True:
            path = f"/api/v1/jobs/{job_id}/notifications"
            page = self._get(DeliveryPage, path, limit=_PAGE, page_token=token)
            yield from page.items
            if (token := page.next_page_token) is None:
                return

    def change(self, job_id: str, *, queue: str | None = None, priority: int | None = None) -> JobView:
        """Move a waiting job to another queue or priority."""
        given = {"queue": queue, "priority": priority}
        body = {field: value for field, value in given.items() if value is not None}
        return self._parsed(JobView, self._call("PATCH", f"/api/v1/jobs/{job_id}", json=body))

    def queues(self) -> list[QueueView]:
        """Quotas, and why each waiting job waits."""
        return self._get(QueueList, "/api/v1/queues").items

    def set_quota(self, queue: str, quota: int | None) -> QueueQuotaView:
        """Let the queue's running jobs hold so many accelerators together (None: any number), for operators."""
        answer = self._call("PUT", f"/api/v1/queues/{queue}/quota", json={"quota": quota})
        return self._parsed(QueueQuotaView, answer)

    def reset_quota(self, queue: str) -> QueueQuotaView:
        """Back to the configured quota, for operators."""
        return self._parsed(QueueQuotaView, self._call("DELETE", f"/api/v1/queues/{queue}/quota"))
