"""Whether a store is asked: it is down after a call that hung, and probed at growing intervals."""

from __future__ import annotations


class Health:
    """Of one store. Times are in seconds of one monotonic clock. Not thread-safe."""

    def __init__(self, first_retry: float, longest_retry: float) -> None:
        """A store is probed ``first_retry`` after it went down, then after twice that and so on,
        at most ``longest_retry`` apart."""
        self._first, self._longest = first_retry, longest_retry
        self._backoff = first_retry
        self._retry_at = 0.0
        self.up = True
        #: The interval before the next probe.
        self.retry_in = first_retry

    def hung(self, now: float) -> bool:
        """A call missed its deadline; returns whether the store was up until now."""
        was_up, self.up = self.up, False
        if was_up:
            self._postpone(now)
        return was_up

    def worked(self) -> None:
        """A call other than a probe was answered, so the next outage is a new one."""
        if self.up:
            self._backoff = self._first

    def claim_probe(self, now: float) -> bool:
        """Whether the caller shall probe now. The next probe is due an interval later, also if this
        one never returns."""
        if self.up or now < self._retry_at:
            return False
        self._postpone(now)
        return True

    def answered(self) -> None:
        """A probe was answered, so the store is up. Should it hang at the next call, the interval
        grows on: it may be one that answers probes and nothing else."""
        self.up = True

    def _postpone(self, now: float) -> None:
        self.retry_in = self._backoff
        self._retry_at = now + self.retry_in
        self._backoff = min(2 * self._backoff, self._longest)
