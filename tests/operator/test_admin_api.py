"""The admin API over HTTP: what it accepts, what it refuses and how, and what it never says twice."""

from __future__ import annotations

import re
import sqlite3

import httpx
import pytest

from proxy.admin.resources import ENDPOINTS
from tests.operator.conftest import ADMIN_TOKEN, Admin


def error(answer: httpx.Response, status: int) -> dict[str, object]:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body["error"]) == {"message", "type", "param", "code"}
    fields: dict[str, object] = body["error"]
    return fields


def test_a_call_without_or_with_a_wrong_token_is_401(admin: Admin) -> None:
    for headers in ({}, {"authorization": "Bearer wrong-token-of-some-length"}, {"authorization": "Basic x"}):
        answer = httpx.get(f"{admin.url}/teams", headers=headers)
        assert error(answer, 401)["code"] == "invalid_api_key"


def test_teams_are_created_read_changed_and_listed_in_pages(admin: Admin) -> None:
    ids = [admin.team(f"team {n}", billing_currency="CNY", credit_limit="12.50") for n in range(5)]
    got = admin.client.get(f"/teams/{ids[0]}").json()
    assert (got["billing_currency"], got["credit_limit"], got["timezone"]) == ("CNY", "12.5", "Asia/Shanghai")
    patched = admin.client.patch(f"/teams/{ids[0]}", json={"tax_id": "91310000", "credit_limit": "20"}).json()
    assert (patched["tax_id"], patched["credit_limit"], patched["name"]) == ("91310000", "20", "team 0")
    seen, cursor = [], None
    while True:
        page = admin.client.get("/teams", params={"limit": 2} | ({"cursor": cursor} if cursor else {})).json()
        seen += [team["id"] for team in page["data"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == ids


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"name": "x", "colour": "red"}, "colour"),
        ({}, "name"),
        ({"name": 5}, "name"),
        ({"name": ""}, "name"),
        ({"name": "x", "billing_currency": "EUR"}, "billing_currency"),
        ({"name": "x", "timezone": "Mars"}, "timezone"),
        ({"name": "x", "tax_rate_bp": -1}, "tax_rate_bp"),
        ({"name": "x", "credit_limit": "-1"}, "credit_limit"),
    ],
)
def test_a_wrong_field_is_400_and_named(admin: Admin, body: dict[str, object], param: str) -> None:
    refused = error(admin.client.post("/teams", json=body), 400)
    assert (refused["type"], refused["param"]) == ("invalid_request_error", param)


def test_an_unknown_field_names_the_allowed_ones(admin: Admin) -> None:
    message = str(error(admin.client.post("/teams", json={"name": "x", "colour": "red"}), 400)["message"])
    assert "unknown field `colour`" in message
    assert "billing_currency" in message


def test_bad_json_wrong_paths_methods_and_queries_are_refused_in_the_same_shape(admin: Admin) -> None:
    client = admin.client
    error(client.post("/teams", content=b"{"), 400)
    error(client.post("/teams", content=b'{"name": "' + b"x" * 1_100_000 + b'"}'), 413)
    assert error(client.get("/nothing"), 404)["code"] == "not_found"
    refused = client.put("/teams", json={})
    assert error(refused, 405)["code"] == "method_not_allowed"
    assert refused.headers["allow"] == "POST, GET"
    assert error(client.get("/teams", params={"limit": "many"}), 400)["param"] == "limit"
    assert error(client.get("/teams", params={"limit": 5000}), 400)["param"] == "limit"
    assert error(client.get("/teams", params={"colour": "red"}), 400)["param"] == "colour"
    assert error(client.get("/teams", params={"cursor": "x"}), 400)["param"] == "cursor"
    assert error(client.get("/teams/team_none"), 404)["code"] == "not_found"


def test_a_key_is_shown_once_and_stored_as_a_hash(admin: Admin) -> None:
    team = admin.team()
    made = admin.client.post("/keys", json={"team_id": team})
    assert made.status_code == 201
    key = made.json()
    assert re.fullmatch(r"sk-tg-[0-9A-Za-z]{43}", key["key"])
    assert key["key"].startswith(key["prefix"])
    assert "key" not in admin.client.get(f"/keys/{key['id']}").json()
    assert "key" not in admin.client.get("/keys").json()["data"][0]
    assert key["key"] not in _whole_database(admin)


def test_keys_are_restricted_blocked_rotated_and_deleted(admin: Admin) -> None:
    team = admin.team()
    body = {
        "team_id": team,
        "name": "ci",
        "expires_at": "2030-01-01T00:00:00Z",
        "models": ["deepseek-v3.2"],
        "drafts": [],
        "allowed_ips": ["10.0.0.0/8"],
        "end_user_required": True,
    }
    key = admin.client.post("/keys", json=body).json()
    assert {name: key[name] for name in body} == body | {"expires_at": "2030-01-01T00:00:00.000Z"}
    path = f"/keys/{key['id']}"
    blocked = admin.client.patch(path, json={"state": "blocked", "models": None}).json()
    assert (blocked["state"], blocked["models"], blocked["drafts"]) == ("blocked", None, [])
    rotated = admin.client.post(f"{path}/rotate", json={"overlap_s": 60})
    assert rotated.status_code == 201
    assert rotated.json()["key"] != key["key"]
    assert admin.client.post(f"{path}/rotate").status_code == 201
    assert admin.client.delete(path).json()["state"] == "deleted"
    assert admin.client.get("/keys", params={"team": team}).json()["data"] == []
    error(admin.client.patch(path, json={"name": "x"}), 404)
    assert error(admin.client.post("/keys", json={"team_id": "none"}), 404)
    refused = admin.client.post("/keys", json={"team_id": team, "expires_at": "tomorrow"})
    assert error(refused, 400)["param"] == "expires_at"
    refused = admin.client.post("/keys", json={"team_id": team, "allowed_ips": ["300.1.1.1"]})
    assert error(refused, 400)["param"] == "allowed_ips"


def test_quotas_are_replaced_as_a_list(admin: Admin) -> None:
    team = admin.team(billing_currency="CNY")
    wanted = [
        {"metric": "requests", "window": "minute", "limit": 60},
        {"metric": "spend", "window": "month", "limit": "50.25"},
        {"metric": "concurrency", "limit": 8, "model": "deepseek-v3.2"},
    ]
    for path in (f"/teams/{team}/quotas", f"/teams/{team}/end-users/ann%40example.com%2Fweb/quotas", "/quotas"):
        body = [
            item | ({"currency": "USD"} if path == "/quotas" and item["metric"] == "spend" else {}) for item in wanted
        ]
        answer = admin.client.put(path, json=body)
        assert answer.status_code == 200, answer.text
        got = admin.client.get(path).json()["data"]
        assert sorted((item["metric"], str(item["limit"])) for item in got) == [
            ("concurrency", "8"),
            ("requests", "60"),
            ("spend", "50.25"),
        ]
        assert admin.client.put(path, json=[]).json()["data"] == []
    refused = admin.client.put(f"/teams/{team}/quotas", json=[{"metric": "requests", "limit": 1}])
    assert error(refused, 400)["param"] == "window"
    refused = admin.client.put(f"/teams/{team}/quotas", json=[{"metric": "requests", "window": "minute", "limt": 1}])
    assert "limt" in str(error(refused, 400)["param"])
    error(admin.client.put("/keys/key_none/quotas", json=[]), 404)


def test_a_payment_is_credited_once_and_shows_in_the_balance(admin: Admin) -> None:
    team = admin.team(billing_currency="CNY")
    payment = {"amount": "100.01", "currency": "CNY", "reference": "bank-1", "note": "first"}
    first = admin.client.post(f"/teams/{team}/topups", json=payment)
    again = admin.client.post(f"/teams/{team}/topups", json=payment)
    assert first.status_code == again.status_code == 201
    assert first.json() == again.json()
    balance = admin.client.get(f"/teams/{team}/balance").json()
    assert (balance["available"], balance["currency"]) == ("100.01", "CNY")
    other = admin.client.post(f"/teams/{team}/topups", json=payment | {"amount": "1"})
    assert error(other, 409)["code"] == "conflict"
    wrong = admin.client.post(f"/teams/{team}/topups", json=payment | {"currency": "USD", "reference": "b"})
    assert error(wrong, 400)["param"] == "currency"
    wrong = admin.client.post(f"/teams/{team}/topups", json=payment | {"amount": "lots", "reference": "b"})
    error(wrong, 400)


def test_prices_and_rates_are_dated_versions_in_both_currencies(admin: Admin) -> None:
    assert admin.client.post("/fx-rates", json={"rate": "7.3"}).status_code == 201
    price = {"model": "deepseek-v3.2", "input": "0.28", "cache_read": "0.028", "output": "0.42"}
    version = admin.client.post("/prices", json=price)
    assert version.status_code == 201, version.text
    (item,) = version.json()["prices"]
    assert (item["usd"]["output"], item["cny"]["output"], item["fx_exact"]) == ("0.42", "3.066", True)
    assert admin.client.get("/fx-rates").json()["data"][0]["rate"] == "7.3"
    assert admin.client.get("/prices").json()["data"][0]["id"] == version.json()["id"]
    assert error(admin.client.post("/prices", json={"model": "m", "input": "1"}), 400)["param"] == "output"
    past = price | {"effective_from": "2020-01-01T00:00:00Z"}
    assert error(admin.client.post("/prices", json=past), 400)["param"] == "effective_from"


def test_an_idempotency_key_gives_the_same_answer_and_changes_nothing(admin: Admin) -> None:
    team = admin.team()
    body = {"team_id": team, "name": "once"}
    headers = {"Idempotency-Key": "abc"}
    first = admin.client.post("/keys", json=body, headers=headers)
    again = admin.client.post("/keys", json=body, headers=headers)
    assert first.status_code == again.status_code == 201
    assert first.content == again.content
    assert again.headers["idempotent-replayed"] == "true"
    assert len(admin.client.get("/keys").json()["data"]) == 1
    other = admin.client.post("/keys", json=body | {"name": "twice"}, headers=headers)
    assert error(other, 422)["code"] == "idempotency_mismatch"
    assert first.json()["key"] not in _whole_database(admin)


def test_a_refused_call_does_not_use_up_its_idempotency_key(admin: Admin) -> None:
    headers = {"Idempotency-Key": "abc"}
    error(admin.client.post("/teams", json={"name": ""}, headers=headers), 400)
    assert admin.client.post("/teams", json={"name": "x"}, headers=headers).status_code == 201


def test_roles_bound_what_a_token_may_do(admin: Admin) -> None:
    team = admin.team()
    tokens = {}
    for role in ("finance", "viewer"):
        answer = admin.client.post("/admin-tokens", json={"name": role, "role": role})
        assert answer.status_code == 201
        tokens[role] = answer.json()
    with admin.with_token(tokens["finance"]["token"]) as finance, admin.with_token(tokens["viewer"]["token"]) as viewer:
        payment = {"amount": "1", "reference": "r"}
        assert finance.post(f"/teams/{team}/topups", json=payment).status_code == 201
        assert error(finance.post("/teams", json={"name": "x"}), 403)["code"] == "role_not_allowed"
        assert error(finance.get("/admin-tokens"), 403)["code"] == "role_not_allowed"
        assert viewer.get(f"/teams/{team}/balance").json()["available"] == "1"
        assert error(viewer.post(f"/teams/{team}/topups", json=payment), 403)["code"] == "role_not_allowed"
        assert admin.client.delete(f"/admin-tokens/{tokens['viewer']['id']}").status_code == 200
        error(viewer.get("/teams"), 401)
    assert tokens["finance"]["token"] not in _whole_database(admin)
    error(admin.client.post("/admin-tokens", json={"name": "x", "role": "god"}), 400)


def test_no_role_may_change_what_is_not_its_own(admin: Admin) -> None:
    """finance: top-ups and invoices. viewer: nothing at all. Whatever endpoint is added must be decided on here."""
    of_finance = {
        "/teams/{team}/topups",
        "/teams/{team}/grants",
        "/teams/{team}/refunds",
        "/invoices",
        "/invoices/{invoice}/finalize",
        "/invoices/{invoice}/pay",
        "/invoices/{invoice}/void",
        "/invoices/{invoice}/credit-notes",
        "/months/{month}/close",
    }
    for role in ("viewer", "finance"):
        token = admin.client.post("/admin-tokens", json={"name": role, "role": role}).json()["token"]
        with admin.with_token(token) as client:
            for endpoint in ENDPOINTS:
                if not endpoint.writes or (role == "finance" and endpoint.path in of_finance):
                    continue
                answer = client.request(endpoint.method, re.sub(r"\{\w+\}", "x", endpoint.path), json={})
                assert error(answer, 403)["code"] == "role_not_allowed", f"{role} {endpoint.method} {endpoint.path}"
            error(client.get("/admin-tokens"), 403)


def test_every_change_is_in_the_audit_chain_with_who_and_why(admin: Admin) -> None:
    team = admin.team("Audited")
    admin.client.patch(f"/teams/{team}", json={"name": "Renamed"}, headers={"X-Audit-Reason": "merger"})
    newest, first = admin.client.get("/audit", params={"team": team}).json()["data"]
    assert (newest["action"], newest["actor"], newest["reason"]) == ("team.update", "admin:configured", "merger")
    assert (newest["before"]["name"], newest["after"]["name"]) == ("Audited", "Renamed")
    assert newest["previous_hash"] == first["hash"]


def test_a_month_is_closed_without_a_slot_only_for_a_reason(admin: Admin) -> None:
    admin.team()
    left_out = {"leave_out": ["host/0"]}
    assert error(admin.client.post("/months/2026-01/close", json=left_out), 400)["param"] == "reason"
    answer = admin.client.post("/months/2026-01/close", json=left_out | {"reason": "in repair"})
    assert "no slot 'host/0'" in str(error(answer, 404)["message"])
    assert admin.client.post("/months/2026-01/close", json={"reason": "month end"}).status_code == 200
    assert admin.client.get("/audit").json()["data"][0]["reason"] == "month end"


def test_a_nul_is_refused_wherever_it_stands(admin: Admin) -> None:
    """PostgreSQL keeps it in no text: it must not become a 500 there."""
    for answer in (
        admin.client.post("/teams", json={"name": "a\0b"}),
        admin.client.get("/teams/a%00b"),
        admin.client.get("/usage", params={"model": "a\0b"}),
    ):
        assert "NUL" in str(error(answer, 400)["message"])


@pytest.mark.parametrize("amount", ["1_000", "１２", "٣", " 5", "5 ", "+5", "1e3", "NaN", "1.", ".5", "0x10", "9" * 61])
def test_an_amount_that_people_could_read_otherwise_is_refused(admin: Admin, amount: str) -> None:
    team = admin.team()
    body = {"amount": amount, "currency": "USD", "reference": f"odd {amount}"}
    error(admin.client.post(f"/teams/{team}/topups", json=body), 400)
    assert admin.client.get(f"/teams/{team}/balance").json()["prepaid"] == "0"


@pytest.mark.parametrize("month", ["0000-01", "0001-01", "9999-12", "2026-11\n", "２０２６-11"])
def test_what_is_no_month_is_neither_proved_nor_billed(admin: Admin, month: str) -> None:
    team = admin.team()
    assert error(admin.client.post("/verify", json={"month": month}), 400)["param"] == "month"
    error(admin.client.post("/invoices", json={"team_id": team, "month": month}), 400)
    for form in ("json", "csv"):
        query = {"team": team, "month": month, "format": form}
        error(admin.client.get("/invoices/export", params=query), 400)


@pytest.mark.parametrize("at", ["0001-01-01", "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "1969-12-31"])
def test_a_time_that_no_clock_shows_is_refused(admin: Admin, at: str) -> None:
    assert (
        error(admin.client.post("/keys", json={"team_id": admin.team(), "expires_at": at}), 400)["param"]
        == "expires_at"
    )
    error(admin.client.get("/usage", params={"from": at}), 400)


def test_the_openapi_document_describes_every_path_that_is_served(admin: Admin) -> None:
    document = httpx.get(f"{admin.url}/openapi.json").json()
    assert document["openapi"] == "3.1.0"
    for path in ("/teams", "/keys/{key}/rotate", "/teams/{team}/end-users/{user}/quotas", "/prices", "/fx-rates"):
        assert path in document["paths"]
    references = set(re.findall(r'"#/components/schemas/([^"]+)"', httpx.get(f"{admin.url}/openapi.json").text))
    assert references <= set(document["components"]["schemas"])
    served = [(method, path) for path, methods in document["paths"].items() for method in methods]
    for method, path in served:
        concrete = re.sub(r"\{\w+\}", "x", path)
        answer = httpx.request(method.upper(), admin.url + concrete)
        assert answer.status_code == 401, f"{method} {path}: {answer.status_code}"


def test_the_configured_token_works_before_anything_is_in_the_database(admin: Admin) -> None:
    with admin.with_token(ADMIN_TOKEN) as client:
        assert client.get("/admin-tokens").json()["data"] == []


def _whole_database(admin: Admin) -> str:
    path = admin.settings.storage.database.removeprefix("sqlite:///")
    with sqlite3.connect(path) as connection:
        return "\n".join(connection.iterdump())
