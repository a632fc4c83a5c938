-- Every table of the registry: the first script.

CREATE TABLE api_keys (
    id VARCHAR(128) NOT NULL,
    description TEXT NOT NULL,
    tenant VARCHAR(64) NOT NULL,
    -- JSON: ["inference:create", ...].
    scopes TEXT NOT NULL,
    digest BYTEA NOT NULL,
    previous_digest BYTEA NOT NULL,
    previous_expires_at TIMESTAMP WITH TIME ZONE,
    created_at TIMESTAMP WITH TIME ZONE NOT NULL,
    expires_at TIMESTAMP WITH TIME ZONE,
    revoked_at TIMESTAMP WITH TIME ZONE,
    rotated_at TIMESTAMP WITH TIME ZONE,
    CONSTRAINT pk_api_keys PRIMARY KEY (id)
);

CREATE TABLE audit_entries (
    sequence BIGINT NOT NULL,
    at TIMESTAMP WITH TIME ZONE NOT NULL,
    event VARCHAR(64) NOT NULL,
    actor TEXT NOT NULL,
    operation VARCHAR(160) NOT NULL,
    detail TEXT NOT NULL,
    previous_hash VARCHAR(64) NOT NULL,
    hash VARCHAR(64) NOT NULL,
    CONSTRAINT pk_audit_entries PRIMARY KEY (sequence)
);

-- The newest events, serialized; a killed registry loses those since its last sweep.
CREATE TABLE events (
    sequence BIGINT NOT NULL,
    event BYTEA NOT NULL,
    CONSTRAINT pk_events PRIMARY KEY (sequence)
);

-- One row: the registry's own id, and the newest time at which an accepted authorization was issued.
CREATE TABLE governance_marks (
    id INTEGER NOT NULL,
    audience VARCHAR(128) NOT NULL,
    newest_issued_at TIMESTAMP WITH TIME ZONE,
    CONSTRAINT pk_governance_marks PRIMARY KEY (id)
);

CREATE TABLE join_tokens (
    id VARCHAR(128) NOT NULL,
    description TEXT NOT NULL,
    secret_sha256 VARCHAR(64) NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE NOT NULL,
    expires_at TIMESTAMP WITH TIME ZONE,
    CONSTRAINT pk_join_tokens PRIMARY KEY (id)
);

-- One row: which pepper the digests were made with, so that another one shows.
CREATE TABLE key_pepper (
    id INTEGER NOT NULL,
    mark BYTEA NOT NULL,
    CONSTRAINT pk_key_pepper PRIMARY KEY (id)
);

-- One row: the highest fencing number ever issued. It stays when the leases are deleted.
CREATE TABLE lease_counter (
    id INTEGER NOT NULL,
    last_fencing_number BIGINT NOT NULL,
    CONSTRAINT pk_lease_counter PRIMARY KEY (id)
);

-- A lease outlives sessions and runners: its memory must be observed as free first. So there are no foreign keys.
CREATE TABLE leases (
    id VARCHAR(128) NOT NULL,
    fencing_number BIGINT NOT NULL,
    request_id VARCHAR(128) NOT NULL,
    host VARCHAR(255) NOT NULL,
    holder_kind INTEGER NOT NULL,
    holder_name VARCHAR(128) NOT NULL,
    holder_incarnation VARCHAR(128) NOT NULL,
    purpose VARCHAR(256) NOT NULL,
    -- JSON: [[device index, bytes], ...] and [[pid, start ticks], ...].
    shares TEXT NOT NULL,
    processes TEXT NOT NULL,
    pinned BOOLEAN NOT NULL,
    priority INTEGER NOT NULL,
    releasing BOOLEAN NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE NOT NULL,
    CONSTRAINT pk_leases PRIMARY KEY (id),
    CONSTRAINT uq_leases_fencing_number UNIQUE (fencing_number)
);

CREATE TABLE operations (
    number BIGINT NOT NULL,
    id VARCHAR(128) NOT NULL,
    request_id VARCHAR(128) NOT NULL,
    action BYTEA NOT NULL,
    state VARCHAR(16) NOT NULL,
    requested_by TEXT NOT NULL,
    signers TEXT NOT NULL,
    runner VARCHAR(128) NOT NULL,
    reason VARCHAR(64) NOT NULL,
    detail TEXT NOT NULL,
    result BYTEA NOT NULL,
    cancel_requested BOOLEAN NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE NOT NULL,
    started_at TIMESTAMP WITH TIME ZONE,
    ended_at TIMESTAMP WITH TIME ZONE,
    CONSTRAINT pk_operations PRIMARY KEY (number),
    CONSTRAINT uq_operations_id UNIQUE (id),
    CONSTRAINT uq_operations_request_id UNIQUE (request_id)
);
CREATE INDEX ix_operations_ended_at ON operations (ended_at);

-- One row: the registry that opened the database last, see weft.sql.postgres.
CREATE TABLE ownership (
    id INTEGER NOT NULL,
    owner VARCHAR(64) NOT NULL,
    address VARCHAR(512),
    backend_pid INTEGER,
    -- Its heartbeats: their number, and the time of the last one by the database's clock.
    beat BIGINT,
    beat_at TIMESTAMP WITH TIME ZONE,
    CONSTRAINT pk_ownership PRIMARY KEY (id)
);

-- Routers with a session, so that gateways know them after a restart of the registry.
CREATE TABLE routers (
    name VARCHAR(128) NOT NULL,
    incarnation VARCHAR(128) NOT NULL,
    address VARCHAR(512) NOT NULL,
    version VARCHAR(128) NOT NULL,
    registered_at TIMESTAMP WITH TIME ZONE NOT NULL,
    CONSTRAINT pk_routers PRIMARY KEY (name)
);

-- The values are encrypted with a key that is not in the database.
CREATE TABLE secrets (
    name VARCHAR(128) NOT NULL,
    version BIGINT NOT NULL,
    -- Which key it is encrypted with.
    key_id VARCHAR(16) NOT NULL,
    sealed BYTEA NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE NOT NULL,
    updated_at TIMESTAMP WITH TIME ZONE NOT NULL,
    CONSTRAINT pk_secrets PRIMARY KEY (name)
);

CREATE TABLE sessions (
    id VARCHAR(128) NOT NULL,
    request_id VARCHAR(128) NOT NULL,
    ticket_key BYTEA NOT NULL,
    CONSTRAINT pk_sessions PRIMARY KEY (id)
);

CREATE TABLE used_nonces (
    nonce VARCHAR(128) NOT NULL,
    operation_id VARCHAR(128) NOT NULL,
    kept_until TIMESTAMP WITH TIME ZONE NOT NULL,
    CONSTRAINT pk_used_nonces PRIMARY KEY (nonce)
);
CREATE INDEX ix_used_nonces_kept_until ON used_nonces (kept_until);

CREATE TABLE runners (
    name VARCHAR(128) NOT NULL,
    session_id VARCHAR(128) NOT NULL,
    incarnation VARCHAR(128) NOT NULL,
    address VARCHAR(512) NOT NULL,
    host VARCHAR(255) NOT NULL,
    runtime VARCHAR(128) NOT NULL,
    version VARCHAR(128) NOT NULL,
    standing VARCHAR(16) NOT NULL,
    last_heartbeat_at TIMESTAMP WITH TIME ZONE NOT NULL,
    inactive_since TIMESTAMP WITH TIME ZONE,
    dial_out BOOLEAN DEFAULT false NOT NULL,
    CONSTRAINT pk_runners PRIMARY KEY (name),
    CONSTRAINT uq_runners_session_id UNIQUE (session_id),
    CONSTRAINT fk_runners_session_id FOREIGN KEY(session_id) REFERENCES sessions (id) ON DELETE CASCADE
);

-- What operators declare, of every kind, and what runners publish, as messages.
CREATE TABLE documents (
    -- A kind of resource, such as "alias", or "settings": those of the whole mesh.
    kind VARCHAR(32) NOT NULL,
    name VARCHAR(128) NOT NULL,
    -- How often it was saved.
    revision BIGINT NOT NULL,
    -- Of its tags; empty: it has none.
    owner VARCHAR(128) NOT NULL,
    -- The serialized record, such as an Alias. It may name runners and documents that do not exist: no foreign keys.
    document BYTEA NOT NULL,
    CONSTRAINT pk_documents PRIMARY KEY (kind, name)
);

CREATE TABLE publications (
    kind VARCHAR(32) NOT NULL,
    name VARCHAR(128) NOT NULL,
    runner VARCHAR(128) NOT NULL,
    document BYTEA NOT NULL,
    CONSTRAINT pk_publications PRIMARY KEY (kind, name),
    CONSTRAINT fk_publications_runner FOREIGN KEY(runner) REFERENCES runners (name) ON DELETE CASCADE
);
CREATE INDEX ix_publications_runner ON publications (runner);
