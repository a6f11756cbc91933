"""The ends of running tasks, of which the earliest comes next: a binary heap of tasks in `Run.heap`."""

from __future__ import annotations

from service.scheduler.kernels.compiled import inlined


@inlined
def push(end, task, run):
    """Into the binary heap of running tasks, earliest end first, of equal ends the lowest task."""
    run.tasks[task].end = end
    at = run.counts[0].running
    run.counts[0].running += 1
    while at > 0:
        parent = (at - 1) >> 1
        other = run.heap[parent]
        if run.tasks[other].end < end or (run.tasks[other].end == end and other < task):
            break
        run.heap[at] = other
        at = parent
    run.heap[at] = task


@inlined
def pop(run):
    """The running task that ends first, taken from the heap."""
    first = run.heap[0]
    run.counts[0].running -= 1
    count = run.counts[0].running
    task = run.heap[count]
    end = run.tasks[task].end
    at = 0
    while True:
        child = 2 * at + 1
        if child >= count:
            break
        right = child + 1
        if right < count and (
            run.tasks[run.heap[right]].end < run.tasks[run.heap[child]].end
            or (
                run.tasks[run.heap[right]].end == run.tasks[run.heap[child]].end
                and run.heap[right] < run.heap[child]
            )
        ):
            child = right
        if end < run.tasks[run.heap[child]].end or (
            end == run.tasks[run.heap[child]].end and task < run.heap[child]
        ):
            break
        run.heap[at] = run.heap[child]
        at = child
    run.heap[at] = task
    return first
