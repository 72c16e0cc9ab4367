"""The workers of a pool by their places, and what happens at their ends."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time

from ._encoder import Encoder
from ._lane import Lane
from ._starts import Counters, Plan, start_lane

_GRACE_S = 1.0


class Crew:
    """The lanes of a pool. `ring` is for any thread, all else for the pool's one thread.

    Attributes:
        lanes: the workers by their places.
        bell: the eventfd that makes `wait` return, -1 when it is closed.
    """

    def __init__(self, plan: Plan, lock: threading.RLock) -> None:
        self.lanes: dict[int, Lane] = {}
        self._plan = plan
        self._lock = lock
        self._by_fd: dict[int, Lane] = {}
        self._counters = Counters(len(plan.initializers))
        self._epoll = select.epoll()
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self.bell, select.EPOLLIN)

    def ring(self) -> None:
        """Make `wait` return."""
        # Not after it is closed: the number may be another file's by then.
        with self._lock:
            if self.bell >= 0:
                os.eventfd_write(self.bell, 1)

    def wait(self, timeout: float | None) -> tuple[list[Lane], list[Lane]]:
        """Wait for something to happen; return who has written and who has ended."""
        written, ended = [], []
        for fd, _ in self._epoll.poll(timeout):
            lane = self._by_fd.get(fd)
            if lane is None:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self.bell)
            elif fd == lane.death_fd:
                ended.append(lane)
            else:
                written.append(lane)
        return written, ended

    def start_missing(self, encoder: Encoder) -> None:
        """Start a worker in each place that has none."""
        for slot in range(len(self._plan.initializers)):
            if slot in self.lanes:
                continue
            own = [self._epoll.fileno(), self.bell]
            for lane in self.lanes.values():
                own += [*lane.pipes.fds, lane.death_fd]
            lane = start_lane(self._plan, slot, self._counters, encoder, forked_close=own)
            for fd in (lane.pipes.results, lane.death_fd):
                self._by_fd[fd] = lane
                self._epoll.register(fd, select.EPOLLIN)
            with self._lock:
                self.lanes[slot] = lane

    def ignore(self, lane: Lane) -> None:
        """Wait for nothing more of a worker."""
        for fd in (lane.pipes.results, lane.death_fd):
            self._epoll.unregister(fd)
            del self._by_fd[fd]

    def stop(self) -> None:
        """Let workers end after what they have been sent."""
        for lane in self.lanes.values():
            if not lane.is_stopping:
                lane.stop()

    def terminate(self) -> None:
        """Make workers end now; `check_kills` sees to those that do not."""
        for lane in self.lanes.values():
            if lane.kill_at is None:
                lane.is_stopping = True
                lane.kill_at = time.monotonic() + _GRACE_S
                lane.kill(signal.SIGTERM)

    def check_kills(self, now: float) -> None:
        """Kill workers whose time is up."""
        for lane in self.lanes.values():
            if lane.kill_at is not None and now >= lane.kill_at:
                lane.kill()
                lane.kill_at = now + _GRACE_S

    def check_timeout(self, limit: float, now: float) -> None:
        """Kill workers whose task runs longer than `limit` seconds."""
        for lane in self.lanes.values():
            begun, since = lane.begun
            if begun in lane.inflight and now - since > limit and not lane.is_overdue:
                lane.is_overdue = True
                lane.kill()

    def alarm(self, limit: float | None, now: float) -> float | None:
        """Return in how many seconds one of the checks has something to do."""
        alarms = []
        for lane in self.lanes.values():
            if lane.kill_at is not None:
                alarms.append(max(1e-3, lane.kill_at - now))
            elif limit is not None and lane.inflight:
                begun, since = lane.begun
                # One that has not begun what it has been sent will do so at once.
                alarms.append(max(1e-3, since + limit - now) if begun in lane.inflight else 0.02)
        return min(alarms, default=None)

    @property
    def has_ready(self) -> bool:
        """Whether a worker is there that takes tasks."""
        return any(lane.is_ready for lane in self.lanes.values())

    @property
    def is_uneven(self) -> bool:
        """Whether one worker has tasks waiting and another none at all."""
        lanes = self.lanes.values()
        return any(len(lane.inflight) > 1 for lane in lanes) and any(
            lane.is_ready and not lane.inflight for lane in lanes
        )

    def close(self) -> None:
        """Let go of all that is open."""
        self._epoll.close()
        self._counters.close()
        with self._lock:
            bell, self.bell = self.bell, -1
            os.close(bell)
