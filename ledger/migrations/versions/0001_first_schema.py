"""The first schema. Frozen: what changes later is a migration of its own.

Revision ID: 0001
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from ledger.schema import PicoSum

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

Int = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
Uuid = sa.Text().with_variant(postgresql.UUID(as_uuid=False), "postgresql")


def upgrade() -> None:
    op.create_table(
        'admin_tokens',
        sa.Column('id', sa.Text(), nullable=False),
        sa.Column('token_hash', sa.Text(), nullable=False),
        sa.Column('name', sa.Text(), nullable=False),
        sa.Column('role', sa.Text(), nullable=False),
        sa.Column('created_ms', Int, nullable=False),
        sa.Column('revoked_ms', Int, nullable=True),
        sa.CheckConstraint("role IN ('admin', 'finance', 'viewer')", name='ck_admin_tokens_role'),
        sa.PrimaryKeyConstraint('id', name='pk_admin_tokens'),
        sa.UniqueConstraint('token_hash', name='uq_admin_tokens_token_hash'),
        sqlite_strict=True
    )
    op.create_table(
        'audit',
        sa.Column('seq', Int, autoincrement=False, nullable=False),
        sa.Column('at_ms', Int, nullable=False),
        sa.Column('actor', sa.Text(), nullable=False),
        sa.Column('action', sa.Text(), nullable=False),
        sa.Column('subject_kind', sa.Text(), nullable=False),
        sa.Column('subject_id', sa.Text(), nullable=False),
        sa.Column('team_id', sa.Text(), nullable=True),
        sa.Column('reason', sa.Text(), nullable=True),
        sa.Column('before', sa.Text(), nullable=True),
        sa.Column('after', sa.Text(), nullable=True),
        sa.Column('previous_hash', sa.Text(), nullable=False),
        sa.Column('hash', sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint('seq', name='pk_audit'),
        sqlite_strict=True
    )
    op.create_table(
        'batches',
        sa.Column('id', sa.Text(), nullable=False),
        sa.Column('slot_id', sa.Text(), nullable=False),
        sa.Column('epoch', sa.Integer(), nullable=False),
        sa.Column('first_seq', Int, nullable=False),
        sa.Column('last_seq', Int, nullable=False),
        sa.Column('chain_hash', sa.Text(), nullable=False),
        sa.Column('rows', sa.Integer(), nullable=False),
        sa.Column('at_ms', Int, nullable=False),
        sa.PrimaryKeyConstraint('id', name='pk_batches'),
        sa.UniqueConstraint('slot_id', 'epoch', 'first_seq', name='uq_batches_slot_id_epoch_first_seq'),
        sqlite_strict=True
    )
    op.create_table(
        'chain_heads',
        sa.Column('name', sa.Text(), nullable=False),
        sa.Column('seq', Int, nullable=False),
        sa.Column('hash', sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint('name', name='pk_chain_heads'),
        sqlite_strict=True
    )
    op.create_table(
        'counters',
        sa.Column('name', sa.Text(), nullable=False),
        sa.Column('value', Int, nullable=False),
        sa.PrimaryKeyConstraint('name', name='pk_counters'),
        sqlite_strict=True
    )
    op.create_table(
        'fx_rates',
        sa.Column('id', sa.Text(), nullable=False),
        sa.Column('base', sa.Text(), nullable=False),
        sa.Column('quote', sa.Text(), nullable=False),
        sa.Column('numerator', PicoSum(), nullable=False),
        sa.Column('denominator', PicoSum(), nullable=False),
        sa.Column('effective_from_ms', Int, nullable=False),
        sa.Column('published_ms', Int, nullable=False),
        sa.PrimaryKeyConstraint('id', name='pk_fx_rates'),
        sa.UniqueConstraint('base', 'quote', 'effective_from_ms', name='uq_fx_rates_base_quote_effective_from_ms'),
        sqlite_strict=True
    )
    op.create_table(
        'idempotency_claims',
        sa.Column('team_id', sa.Text(), nullable=False),
        sa.Column('key_id', sa.Text(), nullable=False),
        sa.Column('idempotency_key', sa.Text(), nullable=False),
        sa.Column('request_id', sa.Text(), nullable=False),
        sa.Column('body_hash', sa.Text(), nullable=False),
        sa.Column('state', sa.Text(), nullable=False),
        sa.Column('answer', sa.LargeBinary(), nullable=True),
        sa.Column('answer_expires_ms', Int, nullable=True),
        sa.Column('at_ms', Int, nullable=False),
        sa.Column('slot_id', sa.Text(), nullable=False),
        sa.Column('epoch', sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint('team_id', 'key_id', 'idempotency_key', name='pk_idempotency_claims'),
        sqlite_strict=True
    )
    op.create_index('ix_idempotency_claims_slot_epoch', 'idempotency_claims', ['slot_id', 'epoch'], unique=False)
    op.create_table(
        'idempotent_admin_calls',
        sa.Column('key', sa.Text(), nullable=False),
        sa.Column('body_hash', sa.Text(), nullable=False),
        sa.Column('status', sa.Integer(), nullable=False),
        sa.Column('answer', sa.LargeBinary(), nullable=False),
        sa.Column('at_ms', Int, nullable=False),
        sa.PrimaryKeyConstraint('key', name='pk_idempotent_admin_calls'),
        sqlite_strict=True
    )
    op.create_table(
        'periods',
        sa.Column('period', sa.Text(), nullable=False),
        sa.Column('timezone', sa.Text(), nullable=False),
        sa.Column('state', sa.Text(), nullable=False),
        sa.Column('closed_ms', Int, nullable=True),
        sa.CheckConstraint("state IN ('open', 'closed')", name='ck_periods_state'),
        sa.PrimaryKeyConstraint('period', 'timezone', name='pk_periods'),
        sqlite_strict=True
    )
    op.create_table(
        'rollups',
        sa.Column('hour_ms', Int, nullable=False),
        sa.Column('period', sa.Text(), nullable=False),
        sa.Column('team_id', sa.Text(), nullable=False),
        sa.Column('key_id', sa.Text(), nullable=False),
        sa.Column('model', sa.Text(), nullable=False),
        sa.Column('deployment', sa.Text(), nullable=False),
        sa.Column('draft_model', sa.Text(), server_default='', nullable=False),
        sa.Column('price_version', sa.Text(), nullable=False),
        sa.Column('slot_id', sa.Text(), nullable=False),
        sa.Column('requests', Int, nullable=False),
        sa.Column('prompt_tokens', Int, nullable=False),
        sa.Column('cached_tokens', Int, nullable=False),
        sa.Column('cache_write_tokens', Int, nullable=False),
        sa.Column('generated_tokens', Int, nullable=False),
        sa.Column('reasoning_tokens', Int, nullable=False),
        sa.Column('billed_tokens', Int, nullable=False),
        sa.Column('draft_tokens', Int, nullable=False),
        sa.Column('accepted_tokens', Int, nullable=False),
        sa.Column('target_passes', Int, nullable=False),
        sa.Column('cost_usd_pico', PicoSum(), nullable=False),
        sa.Column('cost_cny_pico', PicoSum(), nullable=False),
        sa.Column('provider_cost_usd_pico', PicoSum(), nullable=False),
        sa.Column('loss_pico', PicoSum(), nullable=False),
        sa.PrimaryKeyConstraint('hour_ms', 'period', 'team_id', 'key_id', 'model', 'deployment', 'draft_model', 'price_version', 'slot_id', name='pk_rollups'),
        sqlite_strict=True
    )
    op.create_table(
        'slots',
        sa.Column('id', sa.Text(), nullable=False),
        sa.Column('epoch', sa.Integer(), nullable=False),
        sa.Column('journal_uuid', sa.Text(), nullable=False),
        sa.Column('heartbeat_ms', Int, nullable=False),
        sa.Column('live', sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint('id', name='pk_slots'),
        sqlite_strict=True
    )
    op.create_table(
        'suspense',
        sa.Column('slot_id', sa.Text(), nullable=False),
        sa.Column('epoch', sa.Integer(), nullable=False),
        sa.Column('seq', Int, nullable=False),
        sa.Column('request_id', sa.Text(), nullable=True),
        sa.Column('reason', sa.Text(), nullable=False),
        sa.Column('record', sa.LargeBinary(), nullable=False),
        sa.Column('at_ms', Int, nullable=False),
        sa.Column('resolved_ms', Int, nullable=True),
        sa.PrimaryKeyConstraint('slot_id', 'epoch', 'seq', name='pk_suspense'),
        sqlite_strict=True
    )
    op.create_table(
        'teams',
        sa.Column('id', sa.Text(), nullable=False),
        sa.Column('name', sa.Text(), nullable=False),
        sa.Column('billing_currency', sa.Text(), nullable=False),
        sa.Column('timezone', sa.Text(), nullable=False),
        sa.Column('credit_limit_pico', PicoSum(), server_default='0', nullable=False),
        sa.Column('invoice_title', sa.Text(), nullable=True),
        sa.Column('tax_id', sa.Text(), nullable=True),
        sa.Column('tax_rate_bp', sa.Integer(), server_default='0', nullable=False),
        sa.Column('created_ms', Int, nullable=False),
        sa.CheckConstraint("billing_currency IN ('USD', 'CNY')", name='ck_teams_currency'),
        sa.PrimaryKeyConstraint('id', name='pk_teams'),
        sqlite_strict=True
    )
    op.create_table(
        'transfers',
        sa.Column('id', sa.Text(), nullable=False),
        sa.Column('batch_id', sa.Text(), nullable=True),
        sa.Column('at_ms', Int, nullable=False),
        sa.Column('kind', sa.Text(), nullable=False),
        sa.Column('source', sa.Text(), nullable=False),
        sa.Column('destination', sa.Text(), nullable=False),
        sa.Column('amount_pico', PicoSum(), nullable=False),
        sa.Column('currency', sa.Text(), nullable=False),
        sa.Column('team_id', sa.Text(), nullable=True),
        sa.Column('period', sa.Text(), nullable=True),
        sa.Column('reference', sa.Text(), nullable=True),
        sa.CheckConstraint('amount_pico > 0', name='ck_transfers_positive'),
        sa.PrimaryKeyConstraint('id', name='pk_transfers'),
        sqlite_strict=True
    )
    op.create_index('ix_transfers_batch_id', 'transfers', ['batch_id'], unique=False)
    op.create_index('ix_transfers_source', 'transfers', ['source'], unique=False)
    op.create_index('ix_transfers_team_period', 'transfers', ['team_id', 'period'], unique=False)
    op.create_table(
        'usage',
        sa.Column('request_id', Uuid, nullable=False),
        sa.Column('created_ms', Int, nullable=False),
        sa.Column('settled_ms', Int, nullable=False),
        sa.Column('period', sa.Text(), nullable=False),
        sa.Column('team_id', sa.Text(), nullable=False),
        sa.Column('key_id', sa.Text(), nullable=False),
        sa.Column('end_user', sa.Text(), nullable=True),
        sa.Column('model', sa.Text(), nullable=False),
        sa.Column('deployment', sa.Text(), nullable=False),
        sa.Column('draft_model', sa.Text(), nullable=True),
        sa.Column('status', sa.Text(), nullable=False),
        sa.Column('prompt_tokens', Int, nullable=False),
        sa.Column('cached_tokens', Int, nullable=False),
        sa.Column('cache_write_tokens', Int, nullable=False),
        sa.Column('generated_tokens', Int, nullable=False),
        sa.Column('reasoning_tokens', Int, nullable=False),
        sa.Column('billed_tokens', Int, nullable=False),
        sa.Column('waiver_reason', sa.Text(), nullable=True),
        sa.Column('draft_tokens', Int, nullable=False),
        sa.Column('accepted_tokens', Int, nullable=False),
        sa.Column('target_passes', Int, nullable=False),
        sa.Column('estimated', sa.Integer(), nullable=False),
        sa.Column('estimate_reason', sa.Text(), nullable=True),
        sa.Column('attempts', sa.Integer(), nullable=False),
        sa.Column('price_version', sa.Text(), nullable=False),
        sa.Column('cost_usd_pico', Int, nullable=False),
        sa.Column('cost_cny_pico', Int, nullable=False),
        sa.Column('provider_cost_usd_pico', Int, nullable=False),
        sa.Column('loss_pico', Int, nullable=False),
        sa.Column('charges', sa.Text(), nullable=False),
        sa.Column('latency_ms', Int, nullable=False),
        sa.Column('ttft_ms', Int, nullable=True),
        sa.Column('slot_id', sa.Text(), nullable=False),
        sa.Column('epoch', sa.Integer(), nullable=False),
        sa.Column('seq', Int, nullable=False),
        sa.Column('batch_id', sa.Text(), nullable=False),
        sa.Column('record', sa.LargeBinary(), nullable=False),
        sa.CheckConstraint('billed_tokens = prompt_tokens + generated_tokens OR waiver_reason IS NOT NULL', name='ck_usage_waiver_has_reason'),
        sa.CheckConstraint('billed_tokens >= 0 AND billed_tokens <= prompt_tokens + generated_tokens', name='ck_usage_billed'),
        sa.CheckConstraint('cached_tokens + cache_write_tokens <= prompt_tokens', name='ck_usage_cached'),
        sa.CheckConstraint('cost_usd_pico >= 0 AND cost_cny_pico >= 0 AND loss_pico >= 0', name='ck_usage_not_negative'),
        sa.CheckConstraint('reasoning_tokens <= generated_tokens AND accepted_tokens <= draft_tokens', name='ck_usage_subsets'),
        sa.PrimaryKeyConstraint('request_id', name='pk_usage'),
        postgresql_partition_by='RANGE (request_id)',
        sqlite_strict=True
    )
    op.create_index('ix_usage_team_period', 'usage', ['team_id', 'period'], unique=False)
    op.create_table(
        'accounts',
        sa.Column('id', sa.Text(), nullable=False),
        sa.Column('kind', sa.Text(), nullable=False),
        sa.Column('team_id', sa.Text(), nullable=True),
        sa.Column('quota_id', sa.Text(), nullable=True),
        sa.Column('period_start_ms', Int, nullable=True),
        sa.Column('currency', sa.Text(), nullable=False),
        sa.Column('target_pico', PicoSum(), nullable=False),
        sa.Column('credits_pico', PicoSum(), nullable=False),
        sa.Column('debits_pico', PicoSum(), server_default='0', nullable=False),
        sa.Column('leased_pico', PicoSum(), server_default='0', nullable=False),
        sa.Column('expires_at_ms', Int, nullable=True),
        sa.Column('created_ms', Int, nullable=False),
        sa.CheckConstraint("kind IN ('prepaid', 'grant', 'credit_line', 'budget')", name='ck_accounts_kind'),
        sa.CheckConstraint('debits_pico >= 0 AND leased_pico >= 0 AND debits_pico + leased_pico <= credits_pico', name='ck_accounts_never_overspent'),
        sa.ForeignKeyConstraint(['team_id'], ['teams.id'], name='fk_accounts_team_id'),
        sa.PrimaryKeyConstraint('id', name='pk_accounts'),
        sa.UniqueConstraint('quota_id', 'period_start_ms', name='uq_accounts_quota_id_period_start_ms'),
        sqlite_strict=True
    )
    op.create_index('ix_accounts_quota_id', 'accounts', ['quota_id'], unique=False)
    op.create_index('ix_accounts_team_id', 'accounts', ['team_id'], unique=False)
    op.create_table(
        'epochs',
        sa.Column('slot_id', sa.Text(), nullable=False),
        sa.Column('epoch', sa.Integer(), nullable=False),
        sa.Column('journal_uuid', sa.Text(), nullable=False),
        sa.Column('cursor_seq', Int, nullable=False),
        sa.Column('chain_hash', sa.Text(), nullable=False),
        sa.Column('state', sa.Text(), nullable=False),
        sa.Column('opened_ms', Int, nullable=False),
        sa.CheckConstraint("state IN ('open', 'closed', 'lost')", name='ck_epochs_state'),
        sa.ForeignKeyConstraint(['slot_id'], ['slots.id'], name='fk_epochs_slot_id'),
        sa.PrimaryKeyConstraint('slot_id', 'epoch', name='pk_epochs'),
        sqlite_strict=True
    )
    op.create_table(
        'invoices',
        sa.Column('id', sa.Text(), nullable=False),
        sa.Column('team_id', sa.Text(), nullable=False),
        sa.Column('period', sa.Text(), nullable=False),
        sa.Column('kind', sa.Text(), nullable=False),
        sa.Column('state', sa.Text(), nullable=False),
        sa.Column('number', sa.Text(), nullable=True),
        sa.Column('currency', sa.Text(), nullable=False),
        sa.Column('carry_in_pico', PicoSum(), nullable=False),
        sa.Column('exact_pico', PicoSum(), nullable=False),
        sa.Column('billed_pico', PicoSum(), nullable=False),
        sa.Column('carry_out_pico', PicoSum(), nullable=False),
        sa.Column('exact_usd_pico', PicoSum(), nullable=False),
        sa.Column('exact_cny_pico', PicoSum(), nullable=False),
        sa.Column('document', sa.LargeBinary(), nullable=True),
        sa.Column('document_hash', sa.Text(), nullable=True),
        sa.Column('merkle_root', sa.Text(), nullable=True),
        sa.Column('refers_to', sa.Text(), nullable=True),
        sa.Column('created_ms', Int, nullable=False),
        sa.Column('finalized_ms', Int, nullable=True),
        sa.Column('settled_ms', Int, nullable=True),
        sa.CheckConstraint('carry_in_pico + exact_pico = billed_pico + carry_out_pico', name='ck_invoices_carry'),
        sa.ForeignKeyConstraint(['team_id'], ['teams.id'], name='fk_invoices_team_id'),
        sa.PrimaryKeyConstraint('id', name='pk_invoices'),
        sa.UniqueConstraint('number', name='uq_invoices_number'),
        sqlite_strict=True
    )
    op.create_index('ix_invoices_team_period', 'invoices', ['team_id', 'period'], unique=False)
    op.create_table(
        'keys',
        sa.Column('id', sa.Text(), nullable=False),
        sa.Column('team_id', sa.Text(), nullable=False),
        sa.Column('name', sa.Text(), nullable=False),
        sa.Column('prefix', sa.Text(), nullable=False),
        sa.Column('state', sa.Text(), nullable=False),
        sa.Column('expires_at_ms', Int, nullable=True),
        sa.Column('models', sa.Text(), nullable=True),
        sa.Column('drafts', sa.Text(), nullable=True),
        sa.Column('allowed_ips', sa.Text(), nullable=True),
        sa.Column('end_user_required', sa.Integer(), server_default='0', nullable=False),
        sa.Column('created_ms', Int, nullable=False),
        sa.CheckConstraint("state IN ('active', 'blocked', 'deleted')", name='ck_keys_state'),
        sa.ForeignKeyConstraint(['team_id'], ['teams.id'], name='fk_keys_team_id'),
        sa.PrimaryKeyConstraint('id', name='pk_keys'),
        sqlite_strict=True
    )
    op.create_index('ix_keys_team_id', 'keys', ['team_id'], unique=False)
    op.create_table(
        'price_versions',
        sa.Column('id', sa.Text(), nullable=False),
        sa.Column('effective_from_ms', Int, nullable=False),
        sa.Column('published_ms', Int, nullable=False),
        sa.Column('fx_rate_id', sa.Text(), nullable=False),
        sa.Column('approved_by', sa.Text(), nullable=False),
        sa.Column('note', sa.Text(), nullable=True),
        sa.Column('hash', sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(['fx_rate_id'], ['fx_rates.id'], name='fk_price_versions_fx_rate_id'),
        sa.PrimaryKeyConstraint('id', name='pk_price_versions'),
        sa.UniqueConstraint('effective_from_ms', name='uq_price_versions_effective_from_ms'),
        sqlite_strict=True
    )
    op.create_table(
        'key_secrets',
        sa.Column('secret_hash', sa.Text(), nullable=False),
        sa.Column('key_id', sa.Text(), nullable=False),
        sa.Column('valid_until_ms', Int, nullable=True),
        sa.ForeignKeyConstraint(['key_id'], ['keys.id'], name='fk_key_secrets_key_id'),
        sa.PrimaryKeyConstraint('secret_hash', name='pk_key_secrets'),
        sqlite_strict=True
    )
    op.create_index('ix_key_secrets_key_id', 'key_secrets', ['key_id'], unique=False)
    op.create_table(
        'leases',
        sa.Column('slot_id', sa.Text(), nullable=False),
        sa.Column('epoch', sa.Integer(), nullable=False),
        sa.Column('account_id', sa.Text(), nullable=False),
        sa.Column('taken_pico', PicoSum(), server_default='0', nullable=False),
        sa.Column('returned_pico', PicoSum(), server_default='0', nullable=False),
        sa.Column('posted_pico', PicoSum(), server_default='0', nullable=False),
        sa.Column('revision', Int, server_default='0', nullable=False),
        sa.Column('recall', sa.Integer(), server_default='0', nullable=False),
        sa.CheckConstraint('taken_pico >= 0 AND returned_pico >= 0 AND posted_pico >= 0 AND returned_pico + posted_pico <= taken_pico', name='ck_leases_outstanding'),
        sa.ForeignKeyConstraint(['account_id'], ['accounts.id'], name='fk_leases_account_id'),
        sa.PrimaryKeyConstraint('slot_id', 'epoch', 'account_id', name='pk_leases'),
        sqlite_strict=True
    )
    op.create_index('ix_leases_account_id', 'leases', ['account_id'], unique=False)
    op.create_table(
        'price_items',
        sa.Column('version_id', sa.Text(), nullable=False),
        sa.Column('scope', sa.Text(), server_default='default', nullable=False),
        sa.Column('model', sa.Text(), nullable=False),
        sa.Column('meter', sa.Text(), nullable=False),
        sa.Column('usd_pico', Int, nullable=False),
        sa.Column('cny_pico', Int, nullable=False),
        sa.Column('fx_exact', sa.Integer(), nullable=False),
        sa.CheckConstraint("meter IN ('input_uncached', 'cache_read', 'cache_write', 'output_text', 'output_reasoning')", name='ck_price_items_meter'),
        sa.CheckConstraint('usd_pico >= 0 AND cny_pico >= 0', name='ck_price_items_not_negative'),
        sa.ForeignKeyConstraint(['version_id'], ['price_versions.id'], name='fk_price_items_version_id'),
        sa.PrimaryKeyConstraint('version_id', 'scope', 'model', 'meter', name='pk_price_items'),
        sqlite_strict=True
    )
    op.create_table(
        'quotas',
        sa.Column('id', sa.Text(), nullable=False),
        sa.Column('scope', sa.Text(), nullable=False),
        sa.Column('team_id', sa.Text(), nullable=True),
        sa.Column('key_id', sa.Text(), nullable=True),
        sa.Column('end_user', sa.Text(), nullable=True),
        sa.Column('metric', sa.Text(), nullable=False),
        sa.Column('window', sa.Text(), nullable=True),
        sa.Column('model', sa.Text(), nullable=True),
        sa.Column('currency', sa.Text(), nullable=True),
        sa.Column('limit_value', PicoSum(), nullable=False),
        sa.Column('hard', sa.Integer(), server_default='1', nullable=False),
        sa.ForeignKeyConstraint(['key_id'], ['keys.id'], name='fk_quotas_key_id'),
        sa.ForeignKeyConstraint(['team_id'], ['teams.id'], name='fk_quotas_team_id'),
        sa.PrimaryKeyConstraint('id', name='pk_quotas'),
        sqlite_strict=True
    )
    op.create_index('ix_quotas_key_id', 'quotas', ['key_id'], unique=False)
    op.create_index('ix_quotas_team_id', 'quotas', ['team_id'], unique=False)
    op.create_table(
        'topups',
        sa.Column('id', sa.Text(), nullable=False),
        sa.Column('team_id', sa.Text(), nullable=False),
        sa.Column('account_id', sa.Text(), nullable=False),
        sa.Column('amount_pico', PicoSum(), nullable=False),
        sa.Column('currency', sa.Text(), nullable=False),
        sa.Column('provider', sa.Text(), nullable=False),
        sa.Column('reference', sa.Text(), nullable=False),
        sa.Column('note', sa.Text(), nullable=True),
        sa.Column('at_ms', Int, nullable=False),
        sa.ForeignKeyConstraint(['account_id'], ['accounts.id'], name='fk_topups_account_id'),
        sa.ForeignKeyConstraint(['team_id'], ['teams.id'], name='fk_topups_team_id'),
        sa.PrimaryKeyConstraint('id', name='pk_topups'),
        sa.UniqueConstraint('provider', 'reference', name='uq_topups_provider_reference'),
        sqlite_strict=True
    )
    op.create_index('ix_topups_team_id', 'topups', ['team_id'], unique=False)
    op.execute(f"INSERT INTO chain_heads (name, seq, hash) VALUES ('audit', 0, '{'0' * 64}')")
    if op.get_context().dialect.name == "postgresql":
        op.execute("CREATE TABLE usage_default PARTITION OF usage DEFAULT")
        op.execute("CREATE INDEX ix_usage_created_ms_brin ON usage USING brin (created_ms)")


def downgrade() -> None:
    raise NotImplementedError("the ledger only goes forward: restore a backup instead")
