"""The tables, once, for SQLite (STRICT) and PostgreSQL. A change here needs a migration (`ledger/migrations/versions`).

Times are UTC epoch milliseconds (`_ms`), money is pico (`_pico`), identifiers are text, lists and maps are JSON text.
Sums and balances are NUMERIC(38,0) on PostgreSQL; on SQLite they are 64-bit integers: one balance there holds at most
about 9.2 million units of a currency (`money.MAX_SQL_PICO`).
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Numeric,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

Int = BigInteger().with_variant(Integer(), "sqlite")
Uuid = Text().with_variant(postgresql.UUID(as_uuid=False), "postgresql")


class PicoSum(TypeDecorator[int]):
    """An integer of pico that may outgrow 64 bits; always a Python int on this side."""

    impl = Numeric(38, 0)
    cache_ok = True

    def load_dialect_impl(self, dialect: Any) -> Any:
        return dialect.type_descriptor(sqlite.INTEGER() if dialect.name == "sqlite" else Numeric(38, 0))

    def process_bind_param(self, value: int | None, dialect: Any) -> Any:
        return value

    def process_result_value(self, value: Any, dialect: Any) -> int | None:
        return None if value is None else int(value)


def _table(name: str, *parts: Any) -> Table:
    return Table(name, metadata, *parts, sqlite_strict=True)


teams = _table(
    "teams",
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("billing_currency", Text, nullable=False),
    Column("timezone", Text, nullable=False),
    Column("credit_limit_pico", PicoSum, nullable=False, server_default="0"),
    Column("invoice_title", Text),
    Column("tax_id", Text),
    Column("tax_rate_bp", Integer, nullable=False, server_default="0"),
    Column("created_ms", Int, nullable=False),
    Column("plan", Text),  # price scope between default and team
    CheckConstraint("billing_currency IN ('USD', 'CNY')", name="currency"),
)

keys = _table(
    "keys",
    Column("id", Text, primary_key=True),
    Column("team_id", Text, ForeignKey("teams.id"), nullable=False, index=True),
    Column("name", Text, nullable=False),
    Column("prefix", Text, nullable=False),
    Column("state", Text, nullable=False),  # active | blocked | deleted
    Column("expires_at_ms", Int),
    Column("models", Text),  # JSON list; NULL = all
    Column("drafts", Text),  # JSON list; NULL = all that the model allows
    Column("allowed_ips", Text),  # JSON list of addresses and networks; NULL = any
    Column("end_user_required", Integer, nullable=False, server_default="0"),
    Column("created_ms", Int, nullable=False),
    CheckConstraint("state IN ('active', 'blocked', 'deleted')", name="state"),
)

key_secrets = _table(
    "key_secrets",
    Column("secret_hash", Text, primary_key=True),  # hex HMAC-SHA256 of the key
    Column("key_id", Text, ForeignKey("keys.id"), nullable=False, index=True),
    Column("valid_until_ms", Int),  # set by rotation with an overlap
)

admin_tokens = _table(
    "admin_tokens",
    Column("id", Text, primary_key=True),
    Column("token_hash", Text, nullable=False, unique=True),
    Column("name", Text, nullable=False),
    Column("role", Text, nullable=False),
    Column("created_ms", Int, nullable=False),
    Column("revoked_ms", Int),
    CheckConstraint("role IN ('admin', 'finance', 'viewer')", name="role"),
)

quotas = _table(
    "quotas",
    Column("id", Text, primary_key=True),
    Column("scope", Text, nullable=False),  # global | team | key | end_user
    Column("team_id", Text, ForeignKey("teams.id"), index=True),
    Column("key_id", Text, ForeignKey("keys.id"), index=True),
    Column("end_user", Text),
    Column("metric", Text, nullable=False),  # requests | tokens | spend | concurrency
    Column("window", Text),  # minute | hour | day | month | total; NULL for concurrency
    Column("model", Text),
    Column("currency", Text),  # spend only
    Column("limit_value", PicoSum, nullable=False),  # a count; pico of `currency` for spend
    Column("hard", Integer, nullable=False, server_default="1"),
    Column("timezone", Text),  # global ones; the others follow their team's
)

idempotent_admin_calls = _table(
    "idempotent_admin_calls",
    Column("key", Text, primary_key=True),
    Column("body_hash", Text, nullable=False),
    Column("status", Integer, nullable=False),
    Column("answer", LargeBinary, nullable=False),
    Column("at_ms", Int, nullable=False),
)

audit = _table(
    "audit",
    Column("seq", Int, primary_key=True, autoincrement=False),  # gapless: the change feed that workers poll
    Column("at_ms", Int, nullable=False),
    Column("actor", Text, nullable=False),
    Column("action", Text, nullable=False),  # "key.block", "price.publish" …
    Column("subject_kind", Text, nullable=False),
    Column("subject_id", Text, nullable=False),
    Column("team_id", Text),
    Column("reason", Text),
    Column("before", Text),
    Column("after", Text),
    Column("previous_hash", Text, nullable=False),
    Column("hash", Text, nullable=False),
)

chain_heads = _table(
    "chain_heads",
    Column("name", Text, primary_key=True),  # "audit"; locked FOR UPDATE by every writer of that chain
    Column("seq", Int, nullable=False),
    Column("hash", Text, nullable=False),
)

fx_rates = _table(
    "fx_rates",
    Column("id", Text, primary_key=True),
    Column("base", Text, nullable=False),
    Column("quote", Text, nullable=False),
    Column("numerator", PicoSum, nullable=False),
    Column("denominator", PicoSum, nullable=False),
    Column("effective_from_ms", Int, nullable=False),
    Column("published_ms", Int, nullable=False),
    UniqueConstraint("base", "quote", "effective_from_ms"),
)

price_versions = _table(
    "price_versions",
    Column("id", Text, primary_key=True),
    Column("effective_from_ms", Int, nullable=False),
    Column("published_ms", Int, nullable=False),
    Column("fx_rate_id", Text, ForeignKey("fx_rates.id"), nullable=False),
    Column("approved_by", Text, nullable=False),
    Column("note", Text),
    Column("hash", Text, nullable=False),
    UniqueConstraint("effective_from_ms"),
)

price_items = _table(
    "price_items",
    Column("version_id", Text, ForeignKey("price_versions.id"), primary_key=True),
    Column("scope", Text, primary_key=True, server_default="default"),  # default | plan:NAME | team:ID
    Column("model", Text, primary_key=True),
    Column("meter", Text, primary_key=True),
    Column("usd_pico", Int, nullable=False),  # per token
    Column("cny_pico", Int, nullable=False),  # per token, fixed at publication
    Column("fx_exact", Integer, nullable=False),
    Column("currency", Text, nullable=False, server_default="USD"),  # quoted in; the other one follows the FX rate
    CheckConstraint(
        "meter IN ('input_uncached', 'cache_read', 'cache_write', 'output_text', 'output_reasoning')", name="meter"
    ),
    CheckConstraint("usd_pico >= 0 AND cny_pico >= 0", name="not_negative"),
)

accounts = _table(
    "accounts",
    Column("id", Text, primary_key=True),
    Column("kind", Text, nullable=False),  # prepaid | grant | credit_line | budget
    Column("team_id", Text, ForeignKey("teams.id"), index=True),  # NULL: a global budget
    Column("quota_id", Text, index=True),  # budgets
    Column("period_start_ms", Int),  # budgets
    Column("currency", Text, nullable=False),
    Column("target_pico", PicoSum, nullable=False),  # what takes are tested against; below `credits` after a reduction
    Column("credits_pico", PicoSum, nullable=False),
    Column("debits_pico", PicoSum, nullable=False, server_default="0"),
    Column("leased_pico", PicoSum, nullable=False, server_default="0"),
    Column("expires_at_ms", Int),  # grants
    Column("created_ms", Int, nullable=False),
    Column("spent_before_pico", PicoSum, nullable=False, server_default="0"),  # budgets: before they were set
    UniqueConstraint("quota_id", "period_start_ms"),
    CheckConstraint("kind IN ('prepaid', 'grant', 'credit_line', 'budget')", name="kind"),
    CheckConstraint(
        "debits_pico >= 0 AND leased_pico >= 0 AND debits_pico + leased_pico <= credits_pico", name="never_overspent"
    ),
)

topups = _table(
    "topups",
    Column("id", Text, primary_key=True),
    Column("team_id", Text, ForeignKey("teams.id"), nullable=False, index=True),
    Column("account_id", Text, ForeignKey("accounts.id"), nullable=False),
    Column("amount_pico", PicoSum, nullable=False),
    Column("currency", Text, nullable=False),
    Column("provider", Text, nullable=False),  # manual | wechat | alipay
    Column("reference", Text, nullable=False),
    Column("note", Text),
    Column("at_ms", Int, nullable=False),
    UniqueConstraint("provider", "reference"),
)

slots = _table(
    "slots",
    Column("id", Text, primary_key=True),  # "<host>/<n>"
    Column("epoch", Integer, nullable=False),
    Column("journal_uuid", Text, nullable=False),
    Column("heartbeat_ms", Int, nullable=False),
    Column("live", Integer, nullable=False),  # 0 after a clean shutdown
    Column("unsealed_requests", Int),  # that still run in months which it was told to seal; NULL: none is unsealed
)

epochs = _table(
    "epochs",
    Column("slot_id", Text, ForeignKey("slots.id"), primary_key=True),
    Column("epoch", Integer, primary_key=True),
    Column("journal_uuid", Text, nullable=False),
    Column("cursor_seq", Int, nullable=False),  # the last frame that is posted
    Column("chain_hash", Text, nullable=False),  # of that frame
    Column("state", Text, nullable=False),  # open | closed | lost
    Column("opened_ms", Int, nullable=False),
    CheckConstraint("state IN ('open', 'closed', 'lost')", name="state"),
)

leases = _table(
    "leases",
    Column("slot_id", Text, primary_key=True),
    Column("epoch", Integer, primary_key=True),
    Column("account_id", Text, ForeignKey("accounts.id"), primary_key=True, index=True),
    # outstanding = taken - returned - posted. The slot writes the first two, the poster the third: no write conflicts.
    Column("taken_pico", PicoSum, nullable=False, server_default="0"),
    Column("returned_pico", PicoSum, nullable=False, server_default="0"),
    Column("posted_pico", PicoSum, nullable=False, server_default="0"),
    Column("revision", Int, nullable=False, server_default="0"),  # of the slot's own operations
    Column("recall", Integer, nullable=False, server_default="0"),  # another slot is short: return what is idle
    CheckConstraint(
        "taken_pico >= 0 AND returned_pico >= 0 AND posted_pico >= 0 AND returned_pico + posted_pico <= taken_pico",
        name="outstanding",
    ),
)

batches = _table(
    "batches",
    Column("id", Text, primary_key=True),
    Column("slot_id", Text, nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("first_seq", Int, nullable=False),
    Column("last_seq", Int, nullable=False),
    Column("chain_hash", Text, nullable=False),
    Column("rows", Integer, nullable=False),
    Column("at_ms", Int, nullable=False),
    UniqueConstraint("slot_id", "epoch", "first_seq"),
)

usage = Table(
    "usage",
    metadata,
    Column("request_id", Uuid, primary_key=True),
    Column("created_ms", Int, nullable=False),  # admission
    Column("settled_ms", Int, nullable=False),
    Column("period", Text, nullable=False),  # "YYYY-MM" in the team's zone, fixed at admission
    Column("billed_in", Text),  # the later month that bills it: `period` was closed when it was posted
    Column("team_id", Text, nullable=False),
    Column("key_id", Text, nullable=False),
    Column("end_user", Text),
    Column("model", Text, nullable=False),
    Column("deployment", Text, nullable=False),
    Column("draft_model", Text),
    Column("status", Text, nullable=False),
    Column("prompt_tokens", Int, nullable=False),
    Column("cached_tokens", Int, nullable=False),
    Column("cache_write_tokens", Int, nullable=False),
    Column("generated_tokens", Int, nullable=False),
    Column("reasoning_tokens", Int, nullable=False),
    Column("billed_tokens", Int, nullable=False),
    Column("waiver_reason", Text),
    Column("draft_tokens", Int, nullable=False),
    Column("accepted_tokens", Int, nullable=False),
    Column("target_passes", Int, nullable=False),
    Column("estimated", Integer, nullable=False),
    Column("estimate_reason", Text),
    Column("attempts", Integer, nullable=False),
    Column("price_version", Text, nullable=False),
    Column("cost_usd_pico", Int, nullable=False),
    Column("cost_cny_pico", Int, nullable=False),
    Column("provider_cost_usd_pico", Int, nullable=False),
    Column("loss_pico", Int, nullable=False),
    Column("charges", Text, nullable=False),  # JSON [[account_id, pico], …]
    Column("latency_ms", Int, nullable=False),
    Column("ttft_ms", Int),
    Column("slot_id", Text, nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("seq", Int, nullable=False),
    Column("batch_id", Text, nullable=False),
    Column("record", LargeBinary, nullable=False),  # the SETTLE payload, canonical bytes
    CheckConstraint("billed_tokens >= 0 AND billed_tokens <= prompt_tokens + generated_tokens", name="billed"),
    CheckConstraint(
        "billed_tokens = prompt_tokens + generated_tokens OR waiver_reason IS NOT NULL", name="waiver_has_reason"
    ),
    CheckConstraint("cached_tokens + cache_write_tokens <= prompt_tokens", name="cached"),
    CheckConstraint("reasoning_tokens <= generated_tokens AND accepted_tokens <= draft_tokens", name="subsets"),
    CheckConstraint("cost_usd_pico >= 0 AND cost_cny_pico >= 0 AND loss_pico >= 0", name="not_negative"),
    Index("ix_usage_team_period", "team_id", "period"),
    Index(
        "ix_usage_team_billed_in",
        "team_id",
        "billed_in",
        sqlite_where=text("billed_in IS NOT NULL"),
        postgresql_where=text("billed_in IS NOT NULL"),
    ),
    sqlite_strict=True,
    postgresql_partition_by="RANGE (request_id)",
)

transfers = _table(
    "transfers",
    Column("id", Text, primary_key=True),
    Column("batch_id", Text, index=True),  # NULL: not from usage
    Column("at_ms", Int, nullable=False),
    Column("kind", Text, nullable=False),  # usage | topup | grant | refund | credit_note | provider_cost | loss | …
    Column("source", Text, nullable=False),  # an account id, or a derived account such as "clearing:manual"
    Column("destination", Text, nullable=False),  # … "revenue:deepseek-v3.2", "loss", "provider:legacy"
    Column("amount_pico", PicoSum, nullable=False),
    Column("currency", Text, nullable=False),
    Column("team_id", Text),
    Column("period", Text),
    Column("reference", Text),
    CheckConstraint("amount_pico > 0", name="positive"),
    Index("ix_transfers_source", "source"),
    Index("ix_transfers_team_period", "team_id", "period"),
)

rollups = _table(
    "rollups",
    Column("hour_ms", Int, primary_key=True),
    Column("period", Text, primary_key=True),
    Column("billed_in", Text, primary_key=True, server_default=""),  # as in `usage`; empty: in its own period
    Column("team_id", Text, primary_key=True),
    Column("key_id", Text, primary_key=True),
    Column("model", Text, primary_key=True),
    Column("deployment", Text, primary_key=True),
    Column("draft_model", Text, primary_key=True, server_default=""),
    Column("price_version", Text, primary_key=True),
    Column("slot_id", Text, primary_key=True),  # two posters never write the same row
    Column("requests", Int, nullable=False),
    Column("prompt_tokens", Int, nullable=False),
    Column("cached_tokens", Int, nullable=False),
    Column("cache_write_tokens", Int, nullable=False),
    Column("generated_tokens", Int, nullable=False),
    Column("reasoning_tokens", Int, nullable=False),
    Column("billed_tokens", Int, nullable=False),
    Column("draft_tokens", Int, nullable=False),
    Column("accepted_tokens", Int, nullable=False),
    Column("target_passes", Int, nullable=False),
    Column("cost_usd_pico", PicoSum, nullable=False),
    Column("cost_cny_pico", PicoSum, nullable=False),
    Column("provider_cost_usd_pico", PicoSum, nullable=False),
    Column("loss_pico", PicoSum, nullable=False),
)

suspense = _table(
    "suspense",
    Column("slot_id", Text, primary_key=True),
    Column("epoch", Integer, primary_key=True),
    Column("seq", Int, primary_key=True),
    Column("request_id", Text),
    Column("reason", Text, nullable=False),
    Column("record", LargeBinary, nullable=False),
    Column("at_ms", Int, nullable=False),
    Column("resolved_ms", Int),
)

idempotency_claims = _table(
    "idempotency_claims",
    Column("team_id", Text, primary_key=True),
    Column("key_id", Text, primary_key=True),
    Column("idempotency_key", Text, primary_key=True),
    Column("request_id", Text, nullable=False),
    Column("body_hash", Text, nullable=False),
    Column("state", Text, nullable=False),  # running | done
    Column("answer", LargeBinary),
    Column("answer_expires_ms", Int),
    Column("at_ms", Int, nullable=False),
    Column("slot_id", Text, nullable=False),  # whose journal tells how it ended; what is still running when that
    Column("epoch", Integer, nullable=False),  # epoch closes never began
    Index("ix_idempotency_claims_slot_epoch", "slot_id", "epoch"),
)

periods = _table(
    "periods",
    Column("period", Text, primary_key=True),
    Column("timezone", Text, primary_key=True),
    Column("state", Text, nullable=False),  # open | closed; with it all earlier months of that zone
    Column("closed_ms", Int),
    Column("closing_ms", Int),  # since then slots are told to seal it
    CheckConstraint("state IN ('open', 'closed')", name="state"),
)

seals = _table(
    "seals",
    Column("slot_id", Text, primary_key=True),
    Column("epoch", Integer, primary_key=True),
    Column("period", Text, primary_key=True),
    Column("timezone", Text, primary_key=True),
    Column("seq", Int, nullable=False),  # of the SEAL: posted, and so is all of that epoch that belongs to the month
)

counters = _table(
    "counters",
    Column("name", Text, primary_key=True),  # "invoice:2026": gapless numbers, taken in the finalizing transaction
    Column("value", Int, nullable=False),
)

invoices = _table(
    "invoices",
    Column("id", Text, primary_key=True),
    Column("team_id", Text, ForeignKey("teams.id"), nullable=False),
    Column("period", Text, nullable=False),
    Column("kind", Text, nullable=False),  # invoice | credit_note
    Column("state", Text, nullable=False),  # draft | finalized | paid | void
    Column("number", Text, unique=True),
    Column("currency", Text, nullable=False),
    Column("carry_in_pico", PicoSum, nullable=False),
    Column("exact_pico", PicoSum, nullable=False),
    Column("billed_pico", PicoSum, nullable=False),
    Column("carry_out_pico", PicoSum, nullable=False),
    Column("exact_usd_pico", PicoSum, nullable=False),
    Column("exact_cny_pico", PicoSum, nullable=False),
    Column("document", LargeBinary),  # canonical JSON, set when finalized
    Column("document_hash", Text),
    Column("merkle_root", Text),
    Column("refers_to", Text),
    Column("created_ms", Int, nullable=False),
    Column("finalized_ms", Int),
    Column("settled_ms", Int),
    Column("due_pico", PicoSum, nullable=False, server_default="0"),  # to be paid; of a credit note: what it takes off
    CheckConstraint("carry_in_pico + exact_pico = billed_pico + carry_out_pico", name="carry"),
    Index("ix_invoices_team_period", "team_id", "period"),
)

webhook_events = _table(
    "webhook_events",
    Column("id", Text, primary_key=True),
    Column("kind", Text, nullable=False),  # budget | balance | acceptance
    Column("key", Text, nullable=False),  # what happened, once: the same for every worker that notices it
    Column("payload", Text, nullable=False),  # JSON
    Column("at_ms", Int, nullable=False),
    Column("routed_ms", Int),  # since then there is a delivery for each webhook that wants it
    UniqueConstraint("kind", "key"),
    Index("ix_webhook_events_routed_ms", "routed_ms"),
)

webhook_deliveries = _table(
    "webhook_deliveries",
    Column("event_id", Text, ForeignKey("webhook_events.id"), primary_key=True),
    Column("hook", Text, primary_key=True),  # a digest of its URL, which may hold a secret
    Column("state", Text, nullable=False),  # waiting | delivered | given_up
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("next_ms", Int, nullable=False),  # not before; whoever tries moves it on first, so that nobody else does
    Column("done_ms", Int),
    Column("error", Text),  # of the last attempt
    CheckConstraint("state IN ('waiting', 'delivered', 'given_up')", name="state"),
    Index("ix_webhook_deliveries_state_next_ms", "state", "next_ms"),
)

installation = _table(
    "installation",
    Column("name", Text, primary_key=True),  # "key_secret_fingerprint"
    Column("value", Text, nullable=False),
)

# Routes: what was set at run time, and what is known of how deployments do

route_weights = _table(
    "route_weights",
    Column("team_id", Text, primary_key=True),  # '' = every team
    Column("model", Text, primary_key=True),
    Column("weights", Text, nullable=False),  # JSON: deployment → weight; a deployment that is not named has 0
    Column("set_ms", Int, nullable=False),
)

acceptance_states = _table(
    "acceptance_states",
    Column("deployment", Text, primary_key=True),
    Column("draft_model", Text, primary_key=True),
    Column("state", Text, nullable=False),  # healthy | watch | wrong_draft
    Column("draft_tokens", Int, nullable=False),  # of the window that the state was last judged by
    Column("accepted_tokens", Int, nullable=False),
    Column("since_ms", Int, nullable=False),
    Column("seen_ms", Int, nullable=False),
    CheckConstraint("state IN ('healthy', 'watch', 'wrong_draft')", name="state"),
)

deployment_samples = _table(
    "deployment_samples",
    Column("place", Text, primary_key=True),  # `backend` or an upstream's name
    Column("minute_ms", Int, primary_key=True),
    Column("draft_tokens", Int, nullable=False),  # of this minute, by the place's own metrics
    Column("accepted_tokens", Int, nullable=False),
    Column("samples", Integer, nullable=False),  # how often its utilisation was seen
    Column("utilisation_permille", Int, nullable=False),  # the sum of what was seen
)

deployment_failures = _table(
    "deployment_failures",
    Column("model", Text, primary_key=True),
    Column("deployment", Text, primary_key=True),
    Column("minute_ms", Int, primary_key=True),
    Column("failures", Int, nullable=False),  # attempts that failed, also where another deployment then answered
)

ramps = _table(
    "ramps",
    Column("model", Text, primary_key=True),
    Column("state", Text, nullable=False),  # climbing | done | fallen_back
    Column("share_percent", Integer, nullable=False),  # of the deployment that is ramped up
    Column("step_ms", Int, nullable=False),
    Column("deployment", Text),  # that is ramped up; NULL in this and the next two: of before they were kept
    Column("weights", Text),  # as the ramp set them, JSON: others were set by hand
    Column("set_ms", Int),
    CheckConstraint("state IN ('climbing', 'done', 'fallen_back')", name="state"),
)
