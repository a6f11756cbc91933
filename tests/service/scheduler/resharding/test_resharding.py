"""Resharding plans: the literature's figures, what arrives, the bound, the ports."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from dataclasses import replace

import pytest

from service.scheduler.resharding.layout import Links, Tensor, mesh_layout
from service.scheduler.resharding.resharding import (
    plan_gather_then_send,
    plan_resharding,
    plan_send_and_receive,
)
from service.scheduler.resharding.resharding_plan import PlannedResharding
from service.scheduler.views.resharding_views import resharding_summary
from tests.service.scheduler.resharding.cases import (
    CUBE,
    LITERATURE,
    UNIT,
    elements_of,
    random_case,
    simulate,
)


@pytest.mark.parametrize("case", LITERATURE, ids=lambda case: case.name)
def test_the_layouts_of_the_literature_take_what_they_must(case):
    source, target = case.layouts()
    plan = plan_resharding(CUBE, source, target, UNIT)
    assert plan.lower_bound_s == case.planned_s
    # a chain of two hosts lags one chunk behind the bound; everything else meets it
    lag = 0.0 if case.planned_s == 0.5 else 1 / 128
    assert plan.makespan_s == pytest.approx(case.planned_s + lag, rel=1e-9)
    assert plan.proven_optimal == (lag == 0.0)


@pytest.mark.parametrize("case", LITERATURE, ids=lambda case: case.name)
def test_naive_send_and_receive_takes_what_the_literature_measured(case):
    assert plan_send_and_receive(CUBE, *case.layouts(), UNIT).makespan_s == pytest.approx(case.naive_s)


@pytest.mark.parametrize("case", LITERATURE, ids=lambda case: case.name)
def test_a_local_link_eight_times_as_fast_costs_less_than_two_hundredths(case):
    links = Links(card_bytes_per_s=UNIT.card_bytes_per_s, local_bytes_per_s=8 * UNIT.card_bytes_per_s)
    plan = plan_resharding(CUBE, *case.layouts(), links)
    assert case.planned_s <= plan.makespan_s <= case.planned_s + 0.02


@pytest.mark.parametrize("seed", range(200))
def test_every_element_arrives_exactly_once_between_the_bound_and_the_naive_time(seed):
    tensor, source, target, links = random_case(seed)
    plan = plan_resharding(tensor, source, target, links, messages=128)
    arrived = simulate(plan, source, target)
    for w, needed in enumerate(elements_of(target, tensor.shape)):
        assert arrived[f"target/{w}"] == Counter(needed.ravel().tolist())
    assert plan == plan_resharding(tensor, source, target, links, messages=128)
    naive_s = plan_send_and_receive(tensor, source, target, links).makespan_s
    assert plan.lower_bound_s * (1 - 1e-9) <= plan.makespan_s <= naive_s * (1 + 1e-9)
    _check_ports(plan, links)
    _check_hosts(plan)


@pytest.mark.parametrize("seed", range(0, 200, 5))
def test_the_naive_plans_carry_everything_too(seed):
    tensor, source, target, links = random_case(seed)
    for make in (plan_send_and_receive, plan_gather_then_send):
        plan = make(tensor, source, target, links)
        arrived = simulate(plan, source, target)
        for w, needed in enumerate(elements_of(target, tensor.shape)):
            assert set(arrived[f"target/{w}"]) >= set(needed.ravel().tolist())
        _check_ports(plan, links)


def _check_ports(plan: PlannedResharding, links: Links) -> None:
    """One message at a time on each card and local link, in each direction; each as long as its bytes take."""
    workers = {worker.name: worker for worker in plan.workers}
    busy = defaultdict(list)
    for message in plan.messages:
        giver, taker = workers[message.sender], workers[message.receiver]
        assert message.local == (giver.host == taker.host)
        size = (message.end - message.begin) * plan.element_bytes
        if not message.local:
            seconds = size / links.card_bytes_per_s + links.latency_s
        else:
            rate = links.local_bytes_per_s
            seconds = (0.0 if rate is None else size / rate) + links.local_latency_s
        assert message.end_s - message.start_s == pytest.approx(seconds, abs=1e-9)
        for place in (("out", giver), ("in", taker)):
            port = (place[0], place[1].name) if message.local else (place[0], place[1].host, place[1].card)
            busy[port].append((message.start_s, message.end_s))
    for port, spans in busy.items():
        spans = sorted(spans)
        for (_, end), (start, _) in itertools.pairwise(spans):
            assert start >= end - 1e-9, f"two messages at once on {port}"


def _check_hosts(plan: PlannedResharding) -> None:
    """No byte enters a host twice, nor one where a worker holds it from the start."""
    host = {worker.name: worker.host for worker in plan.workers}
    entered = set()
    for message in plan.messages:
        if host[message.sender] == host[message.receiver]:
            continue
        for element in range(message.begin, message.end):
            key = (message.tile, element, host[message.receiver])
            assert key not in entered
            entered.add(key)


def test_the_order_of_the_messages_is_one_that_workers_can_run():
    for seed in range(60):
        plan = plan_resharding(*random_case(seed), messages=128)
        for place, message in enumerate(plan.messages):
            assert all(before < place for before in message.after)
            assert all(plan.messages[b].end_s <= message.start_s + 1e-9 for b in message.after)


def test_uneven_lengths_of_pieces_are_kept():
    source = mesh_layout("source", mesh=(3,), split=(0,), sizes=((1, 0, 9),))
    target = mesh_layout("target", mesh=(4,), split=(0,))
    plan = plan_resharding(Tensor((10,), 4), source, target, Links(1.0))
    boxes = {worker.name: worker.box for worker in plan.workers}
    assert boxes["source/1"] == ((1, 1),) and boxes["source/2"] == ((1, 10),)
    assert [boxes[f"target/{w}"] for w in range(4)] == [((0, 3),), ((3, 6),), ((6, 9),), ((9, 10),)]


def test_two_cards_of_a_host_share_what_it_sends_and_what_it_receives():
    source = mesh_layout("source", mesh=(1, 4), split=(None, None))
    target = mesh_layout(
        "target", mesh=(1, 3), split=(None, None)
    )  # two of three workers are on the first card
    plan = plan_resharding(CUBE, source, target, replace(UNIT, cards_per_host=2))
    assert plan.makespan_s == plan.lower_bound_s == 0.5


def test_replicas_are_gathered_where_local_links_are_slow_and_broadcast_where_messages_are():
    """An all-gather spreads what local links carry, a broadcast needs fewer messages."""
    source, target = (
        mesh_layout("source", mesh=(1, 1), split=(None, None)),
        mesh_layout("target", mesh=(1, 4), split=(None, None)),
    )
    slow_inside = replace(UNIT, local_bytes_per_s=0.8 * UNIT.card_bytes_per_s)
    assert "all-gather" in plan_resharding(CUBE, source, target, slow_inside).strategy
    slow_messages = replace(UNIT, latency_s=0.2)
    assert "broadcast" in plan_resharding(CUBE, source, target, slow_messages).strategy


def test_workers_get_their_own_copies_where_cards_are_faster_than_links_inside():
    source, target = (
        mesh_layout("source", mesh=(4, 1), split=(None, None)),
        mesh_layout("target", mesh=(1, 4), split=(None, None)),
    )
    links = Links(UNIT.card_bytes_per_s, 0.1 * UNIT.card_bytes_per_s, cards_per_host=4)
    plan = plan_resharding(CUBE, source, target, links)
    assert plan.makespan_s == pytest.approx(1.0) and not any(message.local for message in plan.messages)
    assert plan.lower_bound_s == pytest.approx(4 / 4.4)


def test_a_mesh_on_the_same_hosts_uses_no_card():
    hosts = ("a", "a", "b", "b")
    source = mesh_layout("source", mesh=(2, 2), split=(0, None), hosts=hosts)
    target = mesh_layout("target", mesh=(2, 2), split=(0, 1), hosts=hosts)
    plan = plan_resharding(CUBE, source, target, UNIT)
    assert plan.messages and all(message.local for message in plan.messages)
    assert plan.makespan_s == plan.lower_bound_s == 0.0
    links = replace(UNIT, latency_s=0.1, local_latency_s=0.01)
    late = plan_resharding(CUBE, source, target, links)
    assert late.lower_bound_s == 0.01 <= late.makespan_s
    assert "above the optimum" in resharding_summary(late) or late.proven_optimal
    assert "nothing crosses a card" in resharding_summary(late)


def test_latency_limits_how_finely_a_chain_is_cut():
    source, target = (
        mesh_layout("source", mesh=(1,), split=(None,)),
        mesh_layout("target", mesh=(2,), split=(None,)),
    )

    def chunks(latency_s: float) -> float:
        return len(plan_resharding(CUBE, source, target, replace(UNIT, latency_s=latency_s)).messages) / 2

    assert chunks(0.0) == 64
    assert 4 <= chunks(0.01) <= 16  # the root of the tensor's second over a hundredth
    assert chunks(2.0) == 1
