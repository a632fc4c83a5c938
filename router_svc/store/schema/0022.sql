-- The events about ended tasks and batches for the webhooks of tenants.
CREATE TABLE webhook_events (
    id VARCHAR(128) NOT NULL,
    tenant VARCHAR(128) NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    -- When its next attempt begins; NULL: there is none.
    next_at DOUBLE PRECISION,
    -- The serialized WebhookEvent.
    event BYTEA NOT NULL,
    CONSTRAINT pk_webhook_events PRIMARY KEY (id)
);
CREATE INDEX ix_webhook_events_waiting ON webhook_events (tenant, next_at) WHERE next_at IS NOT NULL;
CREATE INDEX ix_webhook_events_created_at ON webhook_events (created_at);
