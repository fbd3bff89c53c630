"""Fault plans: the same plan gives the same faults, and what it says is checked by name."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxlbench.emu.faults import POINTS, Fault, FaultPlan, FaultPlanError, FaultRule
from cxlbench.emu.memory import TORN, PhantomBuffer

ERROR = {"point": "ssd.read", "kind": "error"}


def drawn(plan, visits=200, point="ssd.read", name="dev0"):
    return [fault.kind if (fault := plan.draw(point, name)) else None for _ in range(visits)]


def plan(*rules, seed=1):
    return FaultPlan(tuple(FaultRule(**rule) for rule in rules), seed)


def test_nothing_goes_wrong_without_rules():
    assert drawn(FaultPlan.none()) == [None] * 200


def test_the_same_seed_gives_the_same_faults_and_another_seed_others():
    rule = {**ERROR, "probability": 0.3}
    assert drawn(plan(rule, seed=7)) == drawn(plan(rule, seed=7))
    assert drawn(plan(rule, seed=7)) != drawn(plan(rule, seed=8))


def test_two_rules_alike_do_not_fire_together():
    both = plan({**ERROR, "probability": 0.5}, {**ERROR, "kind": "delay", "delay_s": 1.0})
    kinds = drawn(both)
    assert {"error", "delay"} == set(kinds)


def test_rules_that_differ_in_place_only_draw_different_numbers():
    here_and_there = plan(
        {**ERROR, "probability": 0.5, "where": "dev0"},
        {**ERROR, "probability": 0.5, "where": "dev1"},
    )
    assert drawn(here_and_there, name="dev0") != drawn(here_and_there, name="dev1")


def test_a_rule_does_not_disturb_what_another_point_draws():
    """Adding a rule elsewhere leaves the faults of a rule as they were."""
    alone = plan({**ERROR, "probability": 0.3})
    more = plan({**ERROR, "probability": 0.3}, {"point": "control", "kind": "down"})
    faults = []
    for _ in range(200):
        more.draw("control", "master")
        fault = more.draw("ssd.read", "dev0")
        faults.append(fault.kind if fault else None)
    assert faults == drawn(alone)


@given(st.integers(0, 20), st.none() | st.integers(0, 20))
def test_a_rule_starts_after_skip_visits_and_stops_after_limit_faults(skip, limit):
    kinds = drawn(plan({**ERROR, "skip": skip, "limit": limit}), 60)
    count = 60 - skip if limit is None else min(limit, 60 - skip)
    assert kinds == [None] * skip + ["error"] * count + [None] * (60 - skip - count)


def test_a_probability_is_the_share_of_visits():
    kinds = drawn(plan({**ERROR, "probability": 0.25}), 4000)
    assert 900 <= kinds.count("error") <= 1100


def test_a_rule_holds_where_its_name_is_part_of_the_place():
    some = plan({**ERROR, "where": "node1"})
    assert drawn(some, 3, name="node0.dev0") == [None] * 3
    assert drawn(some, 3, name="node1.dev0") == ["error"] * 3


def test_visits_elsewhere_do_not_use_up_what_a_rule_skips():
    some = plan({**ERROR, "where": "node1", "skip": 1})
    drawn(some, 5, name="node0")
    assert drawn(some, 2, name="node1") == [None, "error"]


def test_what_was_injected_is_counted():
    some = plan({**ERROR, "limit": 3}, {"point": "control", "kind": "down", "limit": 1})
    drawn(some)
    drawn(some, point="control")
    assert some.injected == {"ssd.read error": 3, "control down": 1}


@pytest.mark.parametrize(
    ("point", "kind"), [(point, kind) for point, kinds in POINTS.items() for kind in kinds]
)
def test_every_point_has_the_kinds_that_it_names(point, kind):
    made = plan({"point": point, "kind": kind, "delay_s": 0.5})
    fault = made.draw(point, "anywhere")
    assert (fault.kind, fault.delay_s) == (kind, 0.5)


@given(st.integers(0, 2**32 - 1), st.integers(1, 300))
def test_corruption_flips_exactly_one_bit(salt, nbytes):
    buffer = np.zeros(nbytes, dtype=np.uint8)
    Fault("corrupt", salt=salt).corrupt(buffer)
    assert int(np.unpackbits(buffer).sum()) == 1


def test_corruption_of_nothing_is_nothing():
    Fault("corrupt", salt=5).corrupt(np.zeros(0, dtype=np.uint8))


def test_corruption_of_a_tag_leaves_no_object():
    buffer = PhantomBuffer(4096, "object")
    Fault("corrupt").corrupt(buffer)
    assert buffer.tag == TORN


REFUSED = [
    ({"point": "ssd.reed"}, "unknown point 'ssd.reed'; points are ssd.read, ssd.write"),
    ({"kind": "down"}, "ssd.read cannot have 'down'; it can have error, delay, corrupt"),
    ({"probability": 1.5}, r"probability must be within 0..1, got 1.5"),
    ({"probability": float("nan")}, r"probability must be within 0..1, got nan"),
    ({"probability": "often"}, "probability must be a whole number or a number, got 'often'"),
    ({"skip": -1}, "skip and limit must not be negative, got -1, None"),
    ({"skip": 1.5}, "skip must be a whole number, got 1.5"),
    ({"skip": True}, "skip must be a whole number, got True"),
    ({"limit": -2}, "skip and limit must not be negative, got 0, -2"),
    ({"limit": "3"}, "limit must be a whole number or nothing, got '3'"),
    ({"kind": "delay"}, "delay needs a delay_s above zero"),
    ({"delay_s": -0.1}, "delay_s must be zero or more and finite, got -0.1"),
    ({"kind": "delay", "delay_s": float("inf")}, "finite, got inf"),
    ({"kind": "delay", "delay_s": float("nan")}, "finite, got nan"),
    ({"delay_s": "1 ms"}, "delay_s must be a whole number or a number, got '1 ms'"),
    ({"where": 3}, "where must be a text, got 3"),
    ({"point": ["ssd.read"]}, r"point must be a text, got \['ssd.read'\]"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_a_rule_that_says_something_impossible_is_refused_by_name(changes, message):
    with pytest.raises(FaultPlanError, match=message):
        FaultRule(**{**ERROR, **changes})


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_a_plan_names_the_rule_that_is_refused(changes, message):
    with pytest.raises(FaultPlanError, match=f"^fault plan: fault 2: .*{message}"):
        FaultPlan.parse({"fault": [ERROR, {**ERROR, **changes}]})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"sead": 1}, r"unknown keys \['sead'\]; known: seed, fault"),
        ({"seed": "one"}, "seed must be a whole number"),
        ({"fault": {"point": "control"}}, "fault a list of tables"),
        ({"fault": ["ssd.read"]}, "each fault must be a table"),
        ({"fault": [{**ERROR, "chance": 1}]}, r"fault 1: unknown keys \['chance'\]"),
        ({"fault": [{"point": "control"}]}, r"fault 1: missing \['kind'\]"),
        ({"fault": [{"kind": "down"}]}, r"fault 1: missing \['point'\]"),
        ({"fault": [{**ERROR, "kind": "boom"}]}, "fault 1: unknown kind 'boom'; kinds are error"),
    ],
)
def test_a_plan_that_cannot_be_meant_is_refused(data, message):
    with pytest.raises(FaultPlanError, match=message):
        FaultPlan.parse(data)


def test_a_plan_is_read_from_toml(tmp_path):
    path = tmp_path / "faults.toml"
    path.write_text(
        'seed = 9\n[[fault]]\npoint = "ssd.write"\nkind = "short"\nlimit = 2\nwhere = "dev1"\n'
    )
    read = FaultPlan.load(path)
    assert read.seed == 9
    assert read.rules == (FaultRule(point="ssd.write", kind="short", limit=2, where="dev1"),)


@pytest.mark.parametrize("content", [b"[[fault", b"\xff\xfe", b"seed = 1\nseed = 2"])
def test_a_file_that_is_not_toml_is_named(tmp_path, content):
    path = tmp_path / "faults.toml"
    path.write_bytes(content)
    with pytest.raises(FaultPlanError, match=r"faults.toml: not valid TOML"):
        FaultPlan.load(path)


def test_a_plan_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FaultPlanError, match=r"none.toml: No such file"):
        FaultPlan.load(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed = " + "9" * 5000, "not valid TOML"),
        ("a = " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("seed = true", "seed must be a whole number"),
        ('[[fault]]\npoint = "control"\nkind = "down"\ndelay = 1', "known: point, "),
    ],
)
def test_a_plan_that_cannot_be_read_is_refused_in_words(tmp_path, text, message):
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(FaultPlanError, match=message):
        FaultPlan.load(path)
