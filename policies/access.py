"""Who is asking, and may they ask this: key state, expiry, address, model, end user. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Literal

from policies.quotas import Quota
from policies.refusal import Refusal

Network = IPv4Network | IPv6Network
KeyState = Literal["active", "blocked", "deleted"]


@dataclass(frozen=True, slots=True)
class Principal:
    """A key, its team, and all that limits them: what authentication yields. `None` for a set means no restriction."""

    team_id: str
    key_id: str
    key_name: str
    billing_currency: Literal["USD", "CNY"]
    timezone: str
    state: KeyState = "active"
    expires_at_ms: int | None = None
    models: frozenset[str] | None = None
    drafts: frozenset[str] | None = None
    allowed_networks: tuple[Network, ...] = ()
    end_user_required: bool = False
    quotas: tuple[Quota, ...] = ()


def parse_networks(addresses: Iterable[str]) -> tuple[Network, ...]:
    """Networks of addresses ("10.1.2.3", "2001:db8::1") and CIDR ranges. Raises ValueError naming the bad one."""
    return tuple(ip_network(address.strip(), strict=False) for address in addresses)


def check_access(principal: Principal, model: str, address: str | None, end_user: str | None, now_ms: int) -> None:
    """Raise the Refusal that stands in the way, or return. `address` is the client's, as text.

    A deleted key must look like one that never existed, so it is refused as 401.
    """
    if principal.state == "deleted":
        raise Refusal(401, "invalid_request_error", "invalid_api_key", "The API key does not exist or was deleted.")
    if principal.state != "active":
        raise _forbidden("key_blocked", f"The API key {principal.key_name!r} is blocked. Ask an administrator.")
    if principal.expires_at_ms is not None and now_ms >= principal.expires_at_ms:
        raise _forbidden("key_expired", f"The API key {principal.key_name!r} has expired. Ask for a new one.")
    if principal.allowed_networks and not address_allowed(principal.allowed_networks, address):
        raise _forbidden("ip_not_allowed", f"The address {address} may not use the API key {principal.key_name!r}.")
    if principal.models is not None and model not in principal.models:
        raise _forbidden(
            "model_not_allowed",
            f"The API key {principal.key_name!r} may not use the model {model[:128]!r}; "
            f"it may use: {', '.join(sorted(principal.models)) or 'none'}.",
        )
    if principal.end_user_required and not end_user:
        raise Refusal(
            400,
            "invalid_request_error",
            "missing_required_parameter",
            f"The API key {principal.key_name!r} requires the field 'user' to name the end user.",
            param="user",
        )


def address_allowed(networks: tuple[Network, ...], address: str | None) -> bool:
    """Whether the address lies in one of the networks. An IPv4 address inside IPv6 (::ffff:…) counts as IPv4."""
    try:
        parsed = ip_address((address or "").partition("%")[0])
    except ValueError:
        return False
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    return any(parsed in network for network in networks)


def client_address(peer: str | None, forwarded: Iterable[str], trusted: tuple[Network, ...]) -> str | None:
    """Whose request it is: the peer, or, where that is a trusted proxy, whom the proxies say they pass it on for.

    forwarded: the values of X-Forwarded-For in the order in which they came. Each trusted proxy has added the address
    that it saw at the end, so we go back from there to the first address that is no trusted proxy; what stands before
    it anybody may have written.
    """
    address = peer
    hops = [hop.strip() for value in forwarded for hop in value.split(",")]
    while hops and trusted and address_allowed(trusted, address):
        address = _without_port(hops.pop())
    return address


def _without_port(hop: str) -> str:
    """Some proxies write "192.0.2.1:4711" or "[2001:db8::1]:4711"."""
    if hop.startswith("["):
        return hop[1:].partition("]")[0]
    return hop.partition(":")[0] if hop.count(":") == 1 else hop


def _forbidden(code: str, message: str) -> Refusal:
    return Refusal(403, "permission_error", code, message, should_retry=False)
