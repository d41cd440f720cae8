from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from extproc.endpoint import Endpoint, Load
from extproc.pool import candidate_builder
from extproc.pool.inflight import InflightLoad, Reservation
from extproc.pool.store import PoolStore, ScrapeToken
from tests.support.seeded import examples

ADDRESSES = ("10.0.0.1:8000", "10.0.0.1:8001", "[fd00::1]:8000", "10.0.0.2:8000")
some = st.lists(st.sampled_from(ADDRESSES), max_size=5)
counts = st.one_of(st.none(), st.integers(0, 9).map(float))


class Fleets(RuleBasedStateMachine):
    """Discovery, scrapes and requests in any order."""

    tickets = Bundle("tickets")
    marks = Bundle("marks")

    def __init__(self) -> None:
        super().__init__()
        self.gone: list[Endpoint] = []
        self.store = PoolStore(on_gone=self.gone.append)
        self.accounts: dict[int, InflightLoad] = {}
        self.open: list[Reservation] = []
        self.now = 0.0

    @rule(addresses=some, name=st.sampled_from(["", "a", "b"]))
    def set_endpoints(self, addresses: list[str], name: str) -> None:
        before = self.store.pool
        num_gone = len(self.gone)
        self.store.set_endpoints([Endpoint(address, name) for address in addresses], self.now)
        left = {member.endpoint.address for member in before.members} - set(addresses)
        assert {endpoint.address for endpoint in self.gone[num_gone:]} == left
        assert [member.endpoint.address for member in self.store.pool.members] == list(
            dict.fromkeys(addresses)
        )

    @rule(target=tickets, address=st.sampled_from(ADDRESSES), tokens=st.integers(0, 9))
    def start(self, address: str, tokens: int) -> Reservation | None:
        member = self.store.pool.find(address)
        if member is None:
            return None
        reservation = member.account.open("m", tokens, cached_tokens=0, now=0.0)
        self.open.append(reservation)
        return reservation

    @rule(ticket=tickets, address=st.sampled_from(ADDRESSES), cached=st.integers(0, 9))
    def move(self, ticket: Reservation | None, address: str, cached: int) -> None:
        member = self.store.pool.find(address)
        if ticket is not None and member is not None:
            ticket.move(member.account, 0.0, cached_tokens=cached)

    @rule(ticket=consumes(tickets))
    def end(self, ticket: Reservation | None) -> None:
        if ticket is not None:
            ticket.close(0.0)
            self.open.remove(ticket)

    @rule(target=marks, address=st.sampled_from(ADDRESSES))
    def begin_scrape(self, address: str) -> ScrapeToken | None:
        member = self.store.pool.find(address)
        return None if member is None else self.store.begin_scrape(member.endpoint)

    @rule(mark=consumes(marks), running=counts, waiting=counts)
    def observe(
        self, mark: ScrapeToken | None, running: float | None, waiting: float | None
    ) -> None:
        if mark is not None:
            self.now += 1.0
            load = Load(at=self.now, running=running, waiting=waiting)
            self.store.observe(mark, load, self.now)

    @rule(mark=consumes(marks), reason=st.sampled_from(["refused", "timeout", "status"]))
    def fail(self, mark: ScrapeToken | None, reason: str) -> None:
        if mark is not None:
            self.store.scrape_failed(mark, reason, self.now)

    @invariant()
    def accounts_add_up(self) -> None:
        """No count is negative, and all lives together hold exactly the open tickets."""
        for member in self.store.pool.members:
            known = self.accounts.setdefault(member.endpoint.incarnation, member.account)
            assert known is member.account
        for account in self.accounts.values():
            assert account.in_flight >= 0
            assert account.prompt_tokens >= 0
            assert sum(account.adapters.values()) == account.in_flight
        assert sum(account.in_flight for account in self.accounts.values()) == len(self.open)

    @invariant()
    def the_snapshot_is_consistent(self) -> None:
        """Positions, the down count and the candidates agree with the members."""
        pool = self.store.pool
        assert [pool.find(member.endpoint.address) for member in pool.members] == list(pool.members)
        assert len(pool.positions) == len(pool.members)
        assert pool.down == sum(not member.is_up for member in pool.members)
        assert bool(pool.eligible(None)) is bool(pool.members)
        for subset in ((), ("10.0.0.1",), ("[fd00::1]:8000", "nobody")):
            chosen = pool.eligible(subset)
            assert all(member in pool.members for member in chosen)
        turn = candidate_builder.build_candidates(
            pool.members,
            [0] * len(pool.members),
            adapter="",
            adapters=frozenset(),
            now=self.now,
            imputation=candidate_builder.Imputer().impute(
                pool.members, pool=pool, oldest=self.now - 5.0
            ),
        )
        for candidate in turn:
            assert candidate.estimated_requests >= candidate.in_flight >= 0

    def teardown(self) -> None:
        """When every request has ended, every account of every life is zero."""
        for reservation in self.open:
            reservation.close(0.0)
        for account in self.accounts.values():
            assert (account.in_flight, account.prompt_tokens, account.adapters) == (0, 0, {})


TestFleets = Fleets.TestCase
TestFleets.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
