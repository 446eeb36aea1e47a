"""Closing a month: which slots have sealed it, what was posted too late for it, and what an invoice leaves to be paid.

Revision ID: 0004
"""

import sqlalchemy as sa
from alembic import op

from ledger.money import floor_to_cent
from ledger.schema import PicoSum
from ledger.sums import exact_sum, read_sum

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

Int = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
KEYS = "hour_ms, period, billed_in, team_id, key_id, model, deployment, draft_model, price_version, slot_id"
COUNTS = (
    "requests, prompt_tokens, cached_tokens, cache_write_tokens, generated_tokens, reasoning_tokens, billed_tokens, "
    "draft_tokens, accepted_tokens, target_passes"
)
SUMS = "cost_usd_pico, cost_cny_pico, provider_cost_usd_pico, loss_pico"


def upgrade() -> None:
    op.add_column("usage", sa.Column("billed_in", sa.Text(), nullable=True))
    op.create_index(
        "ix_usage_team_billed_in",
        "usage",
        ["team_id", "billed_in"],
        sqlite_where=sa.text("billed_in IS NOT NULL"),
        postgresql_where=sa.text("billed_in IS NOT NULL"),
    )
    op.add_column("periods", sa.Column("closing_ms", Int, nullable=True))
    op.add_column("slots", sa.Column("unsealed_requests", Int, nullable=True))
    op.add_column("invoices", sa.Column("due_pico", PicoSum(), server_default="0", nullable=False))
    set_what_is_due()
    op.create_table(
        "seals",
        sa.Column("slot_id", sa.Text(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("period", sa.Text(), nullable=False),
        sa.Column("timezone", sa.Text(), nullable=False),
        sa.Column("seq", Int, nullable=False),
        sa.PrimaryKeyConstraint("slot_id", "epoch", "period", "timezone", name="pk_seals"),
        sqlite_strict=True,
    )
    if op.get_context().dialect.name == "postgresql":
        op.add_column("rollups", sa.Column("billed_in", sa.Text(), server_default="", nullable=False))
        op.execute(f"ALTER TABLE rollups DROP CONSTRAINT pk_rollups, ADD CONSTRAINT pk_rollups PRIMARY KEY ({KEYS})")
    else:
        rebuild_rollups_on_sqlite()


def set_what_is_due() -> None:
    """The invoices there are ask for what their months drew on credit, so that no later one does. What is paid refilled
    no credit line, and does not now."""
    amount, due = sa.column("amount_pico", PicoSum()), sa.column("due_pico", PicoSum())
    invoices = sa.table("invoices", *map(sa.column, ("id", "team_id", "period", "kind", "state", "billed_pico")), due)
    transfers = sa.table("transfers", *map(sa.column, ("kind", "source", "period")), amount)
    i, t, c = invoices.c, transfers.c, op.get_bind()
    live = sa.select(i.id, i.team_id, i.period, i.billed_pico).where(i.kind == "invoice", i.state != "void")
    left: dict[str, int] = {}
    """Team → what its invoices so far leave of what it drew."""
    for row in c.execute(live.order_by(i.team_id, i.period)).all():
        drawn = sa.select(*exact_sum(amount)).where(
            t.kind == "usage", t.source == f"credit:{row.team_id}", t.period == row.period
        )
        not_asked = left.get(row.team_id, 0) + read_sum(c.execute(drawn).mappings().one(), "amount_pico")
        asked = min(int(row.billed_pico), floor_to_cent(not_asked)[0])
        left[row.team_id] = not_asked - asked
        c.execute(sa.update(invoices).where(i.id == row.id).values(due_pico=asked))


def rebuild_rollups_on_sqlite() -> None:
    """SQLite cannot change a primary key."""
    counts = ", ".join(f"{name} INTEGER NOT NULL" for name in f"{COUNTS}, {SUMS}".split(", "))
    old = KEYS.replace("billed_in, ", "")
    op.execute("ALTER TABLE rollups RENAME TO rollups_before")
    op.execute(
        "CREATE TABLE rollups (hour_ms INTEGER NOT NULL, period TEXT NOT NULL, billed_in TEXT DEFAULT '' NOT NULL, "
        "team_id TEXT NOT NULL, key_id TEXT NOT NULL, model TEXT NOT NULL, deployment TEXT NOT NULL, "
        "draft_model TEXT DEFAULT '' NOT NULL, price_version TEXT NOT NULL, slot_id TEXT NOT NULL, "
        f"{counts}, CONSTRAINT pk_rollups PRIMARY KEY ({KEYS})) STRICT"
    )
    op.execute(
        f"INSERT INTO rollups ({old}, billed_in, {COUNTS}, {SUMS}) "
        f"SELECT {old}, '', {COUNTS}, {SUMS} FROM rollups_before"
    )
    op.execute("DROP TABLE rollups_before")


def downgrade() -> None:
    raise NotImplementedError("the ledger only goes forward: restore a backup instead")
