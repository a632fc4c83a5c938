-- Prompts and answers of tenants with `capture`, encrypted as secrets are.
CREATE TABLE captures (
    -- Tenant and request, see `registry_svc.captures.captures`.
    id VARCHAR(256) NOT NULL,
    key_id VARCHAR(16) NOT NULL,
    sealed BYTEA NOT NULL,
    captured_at TIMESTAMP WITH TIME ZONE NOT NULL,
    CONSTRAINT pk_captures PRIMARY KEY (id)
);
