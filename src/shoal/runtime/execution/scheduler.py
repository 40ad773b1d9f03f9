"""Schedules the endpoints of one thread: runs each one that is ready until it has to wait."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

from shoal.errors import RunError
from shoal.planning.plan import Replica
from shoal.planning.policy import Serve
from shoal.profiling.recorder import EndpointRecorder, now
from shoal.profiling.spans import Kind, SpanBuffer
from shoal.runtime.channels.channel import Channel, Waker
from shoal.runtime.channels.flow_control import waits
from shoal.runtime.execution.limit import Limit
from shoal.runtime.execution.replica_runner import Failure, ReplicaRunner, Runs, Wants

LONG_WAIT_S = 1.0  # a wait is reported after this long
Spend = Callable[[str, float], None]  # counts seconds of an activity
RunMany = Callable[[list[Runs]], Sequence[Sequence[Any]]]


class Stopped(Exception):
    """Raised in a waiting scheduler when the run stops."""


class Scheduler:
    """Runs its endpoints until all synchronous ones have finished."""

    def __init__(
        self,
        workers: Iterable[ReplicaRunner],
        channels: Mapping[str, Channel],
        waker: Waker | None,
        serve: Serve | None = None,
        run_many: RunMany | None = None,
    ) -> None:
        self._workers = {w.replica: w for w in workers}
        self._channels, self._waker = channels, waker
        self._serve, self._run_many = serve or Serve(), run_many
        self._running: dict[Replica, Generator[Wants | Runs, Any, None]] = {}
        self._waiting: dict[Replica, Wants] = {}
        self._asking: dict[Replica, Runs] = {}
        self._ready: deque[tuple[Replica, Any]] = deque()
        self._since = 0.0
        self._report, self._has_reported = (lambda text: None), False
        self._spend: Spend = lambda activity, seconds: None

    def reports_to(self, report: Callable[[str], None], spend: Spend) -> Scheduler:
        """Call `report` with the reason of a long wait, and with "" when it ends; count all waits.

        Waits for several channels at once are shared equally among them.
        """
        self._report, self._spend = report, spend
        return self

    def records_in(
        self, buffer: SpanBuffer, fragments: Sequence[str], *, copies: bool
    ) -> Scheduler:
        """Record spans in a buffer; sites count by the order of the plan's fragments."""
        for (fragment, end), worker in self._workers.items():
            recorder = EndpointRecorder(buffer, end, copies=copies)
            worker.recorder = recorder.of(worker.program, fragments.index(fragment))
        return self

    @property
    def name(self) -> str:
        """The fragment and the range of its endpoints."""
        (fragment, first), *others = self._workers
        return f"{fragment}[{first}{f'-{others[-1][1]}' if others else ''}]"

    @property
    def is_asynchronous(self) -> bool:
        """Whether all of its endpoints are asynchronous."""
        return all(w.is_asynchronous for w in self._workers.values())

    def run(self, limit: Limit) -> None:
        """Run every endpoint up to the limit."""
        fresh = {r: w.ticks(limit) for r, w in self._workers.items() if r not in self._running}
        self._running |= fresh  # asynchronous endpoints are still in their turn from before
        ready = self._ready  # also those that were ready when the last limit was reached
        ready.extend((replica, None) for replica in fresh)
        while self._is_needed():
            while ready:
                self._advance(*ready.popleft())
            ready.extend((r, None) for r in self._released())
            if not ready and self._is_due():
                ready.extend(self._serve_batch())
            if not ready and self._is_needed():
                self._sleep()

    def _is_needed(self) -> bool:
        """Whether a synchronous endpoint is left to run, or any if all are asynchronous."""
        counted = [r for r, w in self._workers.items() if not w.is_asynchronous]
        return any(r in self._running for r in counted or self._workers)

    def _advance(self, replica: Replica, value: Any) -> None:
        """Run one endpoint until it has to wait."""
        end, worker = self._running[replica], self._workers[replica]
        try:
            while True:
                event = end.send(value)
                value = None
                if isinstance(event, Runs):
                    self._since = self._since if self._asking else time.monotonic()
                    self._asking[replica] = event
                    return
                if not self._may(replica, event):
                    self._waiting[replica] = event
                    return
        except StopIteration:
            del self._running[replica]
        except Stopped:
            raise
        except (Exception, SystemExit) as error:
            raise Failure(replica, worker.tick, error) from error

    def _may(self, replica: Replica, wants: Wants) -> bool:
        state = self._channels[wants.channel].state
        if wants.takes:
            return state.may_take(replica[1], wants.tick)
        return state.may_put(replica[1])

    def _released(self) -> list[Replica]:
        """Endpoints whose wait is over; they wait no longer."""
        found = [r for r, wants in self._waiting.items() if self._may(r, wants)]
        for replica in found:
            del self._waiting[replica]
        return found

    def _is_due(self) -> bool:
        """Whether to run the pending requests now, rather than wait for more of them."""
        if not self._asking:
            return False
        enough = len(self._asking) >= (self._serve.max_batch or len(self._workers))
        return enough or time.monotonic() - self._since >= self._serve.max_wait

    def _serve_batch(self) -> list[tuple[Replica, Any]]:
        """Run pending requests for one segment as a batch; returns the results by endpoint."""
        assert self._run_many is not None
        most = self._serve.max_batch or len(self._asking)
        first = next(iter(self._asking.values()))
        same = [r for r, a in self._asking.items() if a.segment is first.segment][:most]
        asked = [self._asking.pop(replica) for replica in same]
        self._since, began = time.monotonic(), now()
        results = self._run_many(asked)
        self._workers[same[0]].recorder.served(first.segment, began, len(same))
        return list(zip(same, results, strict=True))

    def _sleep(self) -> None:
        if self._waker is None:
            raise RunError(
                "the plan is stuck: " + "; ".join(self.waits()),
                "This is a bug in Shoal's planner: please report it.",
            )
        left = (
            self._since + self._serve.max_wait - time.monotonic() if self._asking else LONG_WAIT_S
        )
        began, began_ns = time.monotonic(), now()
        self._waker.wait(self._is_ready, max(0.0, left))
        self._record_wait(began_ns)
        wanted = {(wants.takes, wants.channel) for wants in self._waiting.values()}
        for takes, channel in wanted:
            seconds = (time.monotonic() - began) / len(wanted)
            self._spend(f"{'take' if takes else 'put'} {channel}", seconds)
        is_long = not self._asking and not self._is_ready()
        if is_long != self._has_reported:
            self._has_reported = is_long
            self._report("; ".join(self.waits()) if is_long else "")

    def _record_wait(self, began: int) -> None:
        """Record a wait for the channel that ended it, or for more requests of a batch."""
        ended = (r for r, wants in self._waiting.items() if self._may(r, wants))
        default = None if self._asking else next(iter(self._waiting))
        if (replica := next(ended, default)) is None:
            self._workers[next(iter(self._asking))].recorder.done(Kind.LINGER, began)
        else:
            wants = self._waiting[replica]
            self._workers[replica].recorder.waited(wants.channel, began, takes=wants.takes)

    def _is_ready(self) -> bool:
        return any(self._may(r, wants) for r, wants in self._waiting.items())

    def waits(self) -> list[str]:
        """The fragment that each waiting endpoint waits for, a line each."""
        gates = {name: c.state.spec.gate for name, c in self._channels.items()}
        return list(waits((r, gates[w.channel], w.takes) for r, w in self._waiting.items()))
