"""Which prefill server gets a request."""

from __future__ import annotations

import pytest

from cxlbench.harness.serve.routing import Router, Routing
from tests.harness.serve.test_gpu_pool import keys_of


def served(router: Router, *paths: str) -> list[int]:
    """Route requests that end at once."""
    chosen = []
    for path in paths:
        server = router.choose(keys_of(path))
        router.done(server)
        chosen.append(server)
    return chosen


def test_round_robin_takes_servers_in_turn_whatever_they_have() -> None:
    router = Router(3, Routing.ROUND_ROBIN)
    assert served(router, "a", "a", "a", "a", "b") == [0, 1, 2, 0, 1]


def test_unknown_prefixes_are_spread_in_turn() -> None:
    assert served(Router(3, Routing.PREFIX), "a", "b", "c", "d") == [0, 1, 2, 0]


def test_a_known_prefix_goes_where_most_of_it_was() -> None:
    router = Router(3, Routing.PREFIX)
    assert served(router, "ab", "b", "ac") == [0, 1, 0]
    assert served(router, "bx", "abcd", "by", "bx") == [1, 0, 1, 1]


def test_the_longest_leading_part_counts_not_the_most_blocks() -> None:
    router = Router(2, Routing.PREFIX)
    assert served(router, "abc", "x") == [0, 1]
    # A chain that differs in its first block shares nothing.
    router._seen[b"ab"] = 0b11
    router._seen[b"abc"] = 0b10
    assert served(router, "abc") == [0]


def test_of_equals_the_least_busy_one_is_taken() -> None:
    router = Router(3, Routing.PREFIX)
    assert [router.choose(keys_of(path)) for path in "abc"] == [0, 1, 2]
    router.done(1)
    assert router.choose(keys_of("new")) == 1


def test_a_server_that_is_far_busier_than_the_idlest_is_passed_over() -> None:
    router = Router(2, Routing.PREFIX, slack=2)
    chosen = [router.choose(keys_of("abc")) for _ in range(4)]
    assert chosen == [0, 0, 0, 1]
    assert router.under_way == [3, 1]
    # Both have seen it by now; the slack counts from the idlest.
    assert router.choose(keys_of("abc")) == 1


def test_what_has_ended_is_not_under_way() -> None:
    router = Router(2, Routing.PREFIX)
    served(router, *["abc"] * 50)
    assert router.under_way == [0, 0]


def test_a_cluster_needs_a_server() -> None:
    with pytest.raises(ValueError, match="at least one prefill server, got 0"):
        Router(0, Routing.ROUND_ROBIN)
