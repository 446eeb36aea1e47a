"""Key state, expiry, address, model and end user, as the wire table says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.access import Principal, address_allowed, check_access, client_address, parse_networks
from policies.refusal import Refusal

NOW = 1_800_000_000_000


def key(**more: Any) -> Principal:
    return Principal("t", "k", "ci", "CNY", "Asia/Shanghai", **more)


def refusal(principal: Principal, address: str | None = "10.0.0.1", user: str | None = None) -> Refusal:
    with pytest.raises(Refusal) as refused:
        check_access(principal, "deepseek-v3.2", address, user, NOW)
    return refused.value


def test_an_active_key_without_restrictions_passes() -> None:
    check_access(key(), "anything", None, None, NOW)


@pytest.mark.parametrize(
    ("principal", "status", "code"),
    [
        (key(state="blocked"), 403, "key_blocked"),
        (key(state="deleted"), 401, "invalid_api_key"),
        (key(expires_at_ms=NOW), 403, "key_expired"),
        (key(models=frozenset({"gpt-4"})), 403, "model_not_allowed"),
        (key(models=frozenset()), 403, "model_not_allowed"),
        (key(allowed_networks=parse_networks(["192.168.0.0/16"])), 403, "ip_not_allowed"),
    ],
)
def test_each_restriction_has_its_status_and_code(principal: Principal, status: int, code: str) -> None:
    refused = refusal(principal)
    assert (refused.status, refused.code) == (status, code)
    if status == 403:
        assert refused.type == "permission_error"
        assert refused.should_retry is False


def test_a_key_expires_at_its_instant_and_not_before() -> None:
    check_access(key(expires_at_ms=NOW + 1), "m", None, None, NOW)


def test_the_message_names_the_models_that_are_allowed() -> None:
    assert "gpt-4" in refusal(key(models=frozenset({"gpt-4"}))).message


@pytest.mark.parametrize(
    "address", ["10.1.2.3", "::ffff:10.1.2.3", "2001:db8::7", "fe80::1%eth0"], ids=["v4", "mapped", "v6", "zone"]
)
def test_addresses_in_the_allowed_networks_pass(address: str) -> None:
    networks = parse_networks(["10.0.0.0/8", "2001:db8::/32", "fe80::1"])
    check_access(key(allowed_networks=networks), "m", address, None, NOW)


@pytest.mark.parametrize("address", [None, "", "unix", "11.0.0.1", "10.0.0", "10.0.0.1:80"])
def test_an_address_that_is_unknown_or_outside_is_refused(address: str | None) -> None:
    assert refusal(key(allowed_networks=parse_networks(["10.0.0.0/8"])), address).code == "ip_not_allowed"


BALANCERS = parse_networks(["10.0.0.0/8", "fd00::/8"])


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("10.0.0.1", ["203.0.113.7"], "203.0.113.7"),
        ("10.0.0.1", ["1.2.3.4, 203.0.113.7"], "203.0.113.7"),  # what the client itself wrote comes first
        ("10.0.0.1", ["1.2.3.4", "203.0.113.7, 10.9.9.9"], "203.0.113.7"),  # two balancers, two headers
        ("10.0.0.1", ["203.0.113.7:4711"], "203.0.113.7"),
        ("fd00::1", ["[2001:db8::7]:80"], "2001:db8::7"),
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", ["10.0.0.2"], "10.0.0.2"),  # a request of the balancers' own network
        ("203.0.113.9", ["10.0.0.1"], "203.0.113.9"),  # nobody that we trust: nothing that it says counts
        (None, ["203.0.113.7"], None),
    ],
)
def test_whom_a_trusted_proxy_names_is_the_client_and_nobody_else_is_believed(
    peer: str | None, forwarded: list[str], client: str | None
) -> None:
    assert client_address(peer, forwarded, BALANCERS) == client
    assert client_address(peer, forwarded, ()) == peer


def test_an_unreadable_hop_is_nobodys_address() -> None:
    named = client_address("10.0.0.1", ["203.0.113.7, unknown"], BALANCERS)
    assert not address_allowed(parse_networks(["0.0.0.0/0"]), named)


@given(st.text(max_size=40))
def test_no_address_text_breaks_the_check(address: str) -> None:
    assert address_allowed(parse_networks(["0.0.0.0/0"]), address) in (True, False)


def test_an_end_user_is_demanded_where_the_key_says_so() -> None:
    refused = refusal(key(end_user_required=True))
    assert (refused.status, refused.param) == (400, "user")
    check_access(key(end_user_required=True), "m", None, "someone", NOW)
