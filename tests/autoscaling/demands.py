"""Builders that name only the fact that matters."""

from __future__ import annotations

from extproc.autoscaling.interface import Demand, PolicyRunner, ReplicaBounds

ZERO_TO_TEN = ReplicaBounds(min=0, max=10)


def demand(now=0.0, spec=1, **facts) -> Demand:
    """One replica that answers, and nothing to do."""
    return Demand(**({"now": now, "spec": spec, "available": spec} | facts))


class TargetFixture:
    """A target that has what it is asked for after a cold start, under one scaler.

    Args:
        policy: Says how many.
        bounds: Of the scaler.
        spec: Replicas there are.
        cold_s: Seconds a new replica takes.
        now: When it begins.
    """

    def __init__(self, policy, bounds=ZERO_TO_TEN, *, spec=0, cold_s=0.0, now=0.0):
        self.scaler = PolicyRunner(policy, bounds)
        self.spec = spec
        self.now = now
        self.cold_s = cold_s
        self.due = []
        #: When the number changed, and to what.
        self.changes = []

    def tick(self, **facts):
        """One step, and what it says is done."""
        self.due = [at for at in self.due if at > self.now]
        available = self.spec - len(self.due)
        demand = Demand(
            **(
                {"now": self.now, "spec": self.spec, "available": available}
                | {"cold_start_s": self.cold_s or 60.0}
                | facts
            )
        )
        return self.step(demand)

    def step(self, demand):
        """One step with this demand."""
        desired = self.scaler.step(demand)
        more = desired.replicas - self.spec
        if more > 0:
            self.due += [self.now + self.cold_s] * more
        elif more < 0:
            self.due = self.due[:more] if len(self.due) > -more else []
        if more:
            self.changes.append((self.now, desired.replicas))
        self.spec = desired.replicas
        return desired

    def run(self, seconds, **facts):
        """Steps at the policy's interval for so many seconds, the same demand in each."""
        desired = None
        for _ in range(round(seconds / self.scaler.policy.interval_s)):
            self.now += self.scaler.policy.interval_s
            desired = self.tick(**facts)
        return desired
