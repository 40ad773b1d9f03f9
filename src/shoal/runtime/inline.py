"""The inline backend: one thread, replicas in turn; the oracle, and the debugger's friend."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from shoal.errors import RunError
from shoal.runtime.fire import Did, Ended, Fire, Gate, State, Stuck, Wants, on_event
from shoal.runtime.limit import Limit
from shoal.runtime.worker import Failure, Worker


def run_inline(workers: Iterable[Worker], gates: dict[str, Gate], limit: Limit) -> None:
    """Turn every worker up to the limit, each as far as it can go before the next."""
    crew = {w.replica: w for w in workers}
    turning = {replica: _guarded(w.ticks(limit), w) for replica, w in crew.items()}
    state = State(gates, frozenset(crew))
    ready = deque(crew)
    while ready:
        replica = ready.popleft()
        for event in turning[replica]:
            state, actions = on_event(state, event)
            fired = [a.replica for a in actions if isinstance(a, Fire)]
            ready.extend(r for r in fired if r != replica)
            if isinstance(event, Wants) and replica not in fired:
                _check(actions)
                break
            assert isinstance(event, Wants | Did)
        else:
            state, actions = on_event(state, Ended(replica))
            _check(actions)


def _guarded(events: Iterator[Wants | Did], worker: Worker) -> Iterator[Wants | Did]:
    try:
        yield from events
    except Exception as error:
        raise Failure(worker.replica, worker.tick, error) from error


def _check(actions: tuple) -> None:
    for action in actions:
        if isinstance(action, Stuck):
            raise RunError(
                "the plan is stuck: " + "; ".join(action.waits),
                "This is a fault of Shoal's planner.",
            )
