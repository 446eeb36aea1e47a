"""The weights that a ramp set, so that a change of the configuration is not taken for weights set by hand.

Revision ID: 0007
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("ramps", sa.Column("deployment", sa.Text()))
    op.add_column("ramps", sa.Column("weights", sa.Text()))
    op.add_column("ramps", sa.Column("set_ms", sa.BigInteger().with_variant(sa.Integer(), "sqlite")))


def downgrade() -> None:
    raise NotImplementedError("the ledger only goes forward: restore a backup instead")
