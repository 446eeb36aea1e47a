"""Events that webhooks are told of, how far each delivery is, and what all hosts of an installation must agree on.

Revision ID: 0003
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

Int = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "webhook_events",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.Column("at_ms", Int, nullable=False),
        sa.Column("routed_ms", Int, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_webhook_events"),
        sa.UniqueConstraint("kind", "key", name="uq_webhook_events_kind_key"),
        sqlite_strict=True,
    )
    op.create_index("ix_webhook_events_routed_ms", "webhook_events", ["routed_ms"])
    op.create_table(
        "webhook_deliveries",
        sa.Column("event_id", sa.Text(), nullable=False),
        sa.Column("hook", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("next_ms", Int, nullable=False),
        sa.Column("done_ms", Int, nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.CheckConstraint("state IN ('waiting', 'delivered', 'given_up')", name="ck_webhook_deliveries_state"),
        sa.ForeignKeyConstraint(["event_id"], ["webhook_events.id"], name="fk_webhook_deliveries_event_id"),
        sa.PrimaryKeyConstraint("event_id", "hook", name="pk_webhook_deliveries"),
        sqlite_strict=True,
    )
    op.create_index("ix_webhook_deliveries_state_next_ms", "webhook_deliveries", ["state", "next_ms"])
    op.create_table(
        "installation",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_installation"),
        sqlite_strict=True,
    )


def downgrade() -> None:
    raise NotImplementedError("the ledger only goes forward: restore a backup instead")
