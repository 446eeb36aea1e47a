"""Weights that were set for a route, how drafts do on their deployments, what deployments report, and ramps.

Revision ID: 0005
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

Int = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "route_weights",
        sa.Column("team_id", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("weights", sa.Text(), nullable=False),
        sa.Column("set_ms", Int, nullable=False),
        sa.PrimaryKeyConstraint("team_id", "model", name="pk_route_weights"),
        sqlite_strict=True,
    )
    op.create_table(
        "acceptance_states",
        sa.Column("deployment", sa.Text(), nullable=False),
        sa.Column("draft_model", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("draft_tokens", Int, nullable=False),
        sa.Column("accepted_tokens", Int, nullable=False),
        sa.Column("since_ms", Int, nullable=False),
        sa.Column("seen_ms", Int, nullable=False),
        sa.CheckConstraint("state IN ('healthy', 'watch', 'wrong_draft')", name="ck_acceptance_states_state"),
        sa.PrimaryKeyConstraint("deployment", "draft_model", name="pk_acceptance_states"),
        sqlite_strict=True,
    )
    op.create_table(
        "deployment_samples",
        sa.Column("place", sa.Text(), nullable=False),
        sa.Column("minute_ms", Int, nullable=False),
        sa.Column("draft_tokens", Int, nullable=False),
        sa.Column("accepted_tokens", Int, nullable=False),
        sa.Column("samples", sa.Integer(), nullable=False),
        sa.Column("utilisation_permille", Int, nullable=False),
        sa.PrimaryKeyConstraint("place", "minute_ms", name="pk_deployment_samples"),
        sqlite_strict=True,
    )
    op.create_table(
        "deployment_failures",
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("deployment", sa.Text(), nullable=False),
        sa.Column("minute_ms", Int, nullable=False),
        sa.Column("failures", Int, nullable=False),
        sa.PrimaryKeyConstraint("model", "deployment", "minute_ms", name="pk_deployment_failures"),
        sqlite_strict=True,
    )
    op.create_table(
        "ramps",
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("share_percent", sa.Integer(), nullable=False),
        sa.Column("step_ms", Int, nullable=False),
        sa.CheckConstraint("state IN ('climbing', 'done', 'fallen_back')", name="ck_ramps_state"),
        sa.PrimaryKeyConstraint("model", name="pk_ramps"),
        sqlite_strict=True,
    )


def downgrade() -> None:
    raise NotImplementedError("the ledger only goes forward: restore a backup instead")
