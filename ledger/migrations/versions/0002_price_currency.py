"""The currency a price was quoted in, the plan of a team, the zone of a global budget; published rows cannot be changed.

Revision ID: 0002
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

APPEND_ONLY = ("audit", "fx_rates", "price_versions", "price_items")


def upgrade() -> None:
    op.add_column("teams", sa.Column("plan", sa.Text(), nullable=True))
    op.add_column("price_items", sa.Column("currency", sa.Text(), nullable=False, server_default="USD"))
    op.add_column("quotas", sa.Column("timezone", sa.Text(), nullable=True))
    if op.get_context().dialect.name == "postgresql":
        refuse_changes_on_postgresql()
    else:
        refuse_changes_on_sqlite()


def refuse_changes_on_postgresql() -> None:
    op.execute(
        "CREATE FUNCTION tallygate_append_only() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION '% is append-only', TG_TABLE_NAME; END $$"
    )
    for table in APPEND_ONLY:
        op.execute(
            f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE ON {table} "
            "FOR EACH ROW EXECUTE FUNCTION tallygate_append_only()"
        )


def refuse_changes_on_sqlite() -> None:
    for table in APPEND_ONLY:
        for act in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER {table}_append_only_{act.lower()} BEFORE {act} ON {table} "
                f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
            )


def downgrade() -> None:
    raise NotImplementedError("the ledger only goes forward: restore a backup instead")
