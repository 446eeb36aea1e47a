"""What was spent in a period before its budget was set.

Revision ID: 0006
"""

import sqlalchemy as sa
from alembic import op

from ledger.schema import PicoSum

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("accounts", sa.Column("spent_before_pico", PicoSum(), server_default="0", nullable=False))


def downgrade() -> None:
    raise NotImplementedError("the ledger only goes forward: restore a backup instead")
