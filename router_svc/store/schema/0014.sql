CREATE TABLE responses (
    id VARCHAR(128) NOT NULL,
    tenant VARCHAR(128) NOT NULL,
    previous_id VARCHAR(128) NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE NOT NULL,
    size INTEGER NOT NULL,
    body BYTEA NOT NULL,
    items BYTEA NOT NULL,
    CONSTRAINT pk_responses PRIMARY KEY (id)
);
CREATE INDEX ix_responses_created_at ON responses (created_at);
CREATE INDEX ix_responses_tenant ON responses (tenant);

CREATE TABLE tasks (
    seq BIGSERIAL NOT NULL CONSTRAINT pk_tasks PRIMARY KEY,
    id VARCHAR(128) NOT NULL,
    tenant VARCHAR(128) NOT NULL,
    idempotency_key VARCHAR(255),
    digest BYTEA NOT NULL,
    state SMALLINT NOT NULL,
    model VARCHAR(320) NOT NULL,
    band SMALLINT NOT NULL,
    batch_id VARCHAR(128) NOT NULL,
    line INTEGER NOT NULL,
    custom_id TEXT NOT NULL,
    origin_kind VARCHAR(64) NOT NULL,
    caller VARCHAR(128) NOT NULL,
    request_id VARCHAR(128),
    labels BYTEA,
    attempt INTEGER NOT NULL,
    failures INTEGER NOT NULL,
    max_attempts INTEGER NOT NULL,
    owner VARCHAR(128) NOT NULL,
    lease_until DOUBLE PRECISION,
    lease_seconds DOUBLE PRECISION,
    pending_limit_seconds DOUBLE PRECISION NOT NULL,
    window_ends_at DOUBLE PRECISION,
    ready_at DOUBLE PRECISION NOT NULL,
    expires_at DOUBLE PRECISION NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    started_at DOUBLE PRECISION,
    ended_at DOUBLE PRECISION,
    last_index INTEGER NOT NULL,
    result_size BIGINT NOT NULL,
    request_size BIGINT DEFAULT 0 NOT NULL,
    error_reason SMALLINT NOT NULL,
    error_message TEXT NOT NULL,
    CONSTRAINT uq_tasks_id UNIQUE (id)
);
CREATE INDEX ix_tasks_lane ON tasks (model, tenant, band, seq) WHERE state = 1;
CREATE INDEX ix_tasks_ready ON tasks (ready_at) WHERE state = 1;
CREATE INDEX ix_tasks_ended ON tasks (ended_at) WHERE state > 2;
CREATE INDEX ix_tasks_expiry ON tasks (expires_at) WHERE state = 1;
CREATE UNIQUE INDEX ix_tasks_key ON tasks (tenant, idempotency_key);
CREATE INDEX ix_tasks_kept ON tasks (tenant, ended_at) WHERE state > 2;
CREATE INDEX ix_tasks_tenant_seq ON tasks (tenant, seq);
CREATE INDEX ix_tasks_lease ON tasks (lease_until) WHERE state = 2;
CREATE INDEX ix_tasks_batch ON tasks (batch_id, line);
CREATE INDEX ix_tasks_request ON tasks (request_id) WHERE request_id IS NOT NULL;

CREATE TABLE files (
    seq BIGSERIAL NOT NULL CONSTRAINT pk_files PRIMARY KEY,
    id VARCHAR(128) NOT NULL,
    tenant VARCHAR(128) NOT NULL,
    name VARCHAR(255) NOT NULL,
    purpose VARCHAR(32) NOT NULL,
    size BIGINT NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    expires_at DOUBLE PRECISION NOT NULL,
    is_whole BOOLEAN NOT NULL,
    media_type VARCHAR(128) DEFAULT '' NOT NULL,
    task_id VARCHAR(128) DEFAULT '' NOT NULL,
    attempt INTEGER DEFAULT 0 NOT NULL,
    CONSTRAINT uq_files_id UNIQUE (id)
);
CREATE INDEX ix_files_tenant_seq ON files (tenant, seq);
CREATE INDEX ix_files_task_id ON files (task_id);
CREATE INDEX ix_files_expires_at ON files (expires_at);

CREATE TABLE batches (
    seq BIGSERIAL NOT NULL CONSTRAINT pk_batches PRIMARY KEY,
    id VARCHAR(128) NOT NULL,
    tenant VARCHAR(128) NOT NULL,
    state SMALLINT NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    lines_ended_at DOUBLE PRECISION,
    ended_at DOUBLE PRECISION,
    -- The serialized Batch.
    batch BYTEA NOT NULL DEFAULT '',
    CONSTRAINT uq_batches_id UNIQUE (id)
);
CREATE INDEX ix_batches_ended_at ON batches (ended_at);
CREATE INDEX ix_batches_tenant_seq ON batches (tenant, seq);

CREATE TABLE promises (
    id INTEGER NOT NULL,
    store_id VARCHAR(128) NOT NULL,
    commits BIGINT NOT NULL,
    CONSTRAINT pk_promises PRIMARY KEY (id)
);

CREATE TABLE usage_hours (
    hour INTEGER NOT NULL,
    tenant VARCHAR(128) NOT NULL,
    key VARCHAR(128) NOT NULL,
    model VARCHAR(320) NOT NULL,
    asked VARCHAR(320) NOT NULL,
    completed_count BIGINT NOT NULL,
    failed_count BIGINT NOT NULL,
    cancelled_count BIGINT NOT NULL,
    rejected_count BIGINT NOT NULL,
    unknown_count BIGINT NOT NULL,
    retried_count BIGINT NOT NULL,
    prompt_tokens BIGINT NOT NULL,
    cached_prompt_tokens BIGINT NOT NULL,
    completion_tokens BIGINT NOT NULL,
    unknown_tokens_count BIGINT NOT NULL,
    gpu_nanoseconds BIGINT NOT NULL,
    unknown_gpu_count BIGINT NOT NULL,
    remote_count BIGINT NOT NULL,
    remote_prompt_tokens BIGINT NOT NULL,
    remote_completion_tokens BIGINT NOT NULL,
    energy_millijoules BIGINT DEFAULT 0 NOT NULL,
    measured_energy_count BIGINT DEFAULT 0 NOT NULL,
    image_steps BIGINT DEFAULT 0 NOT NULL,
    image_pixels BIGINT DEFAULT 0 NOT NULL,
    audio_milliseconds BIGINT DEFAULT 0 NOT NULL,
    CONSTRAINT pk_usage_hours PRIMARY KEY (hour, tenant, key, model, asked)
);

CREATE TABLE usage_entries (
    seq BIGSERIAL NOT NULL CONSTRAINT pk_usage_entries PRIMARY KEY,
    hour INTEGER NOT NULL,
    tenant VARCHAR(128) NOT NULL,
    key VARCHAR(128) NOT NULL,
    model VARCHAR(320) NOT NULL,
    asked VARCHAR(320) NOT NULL,
    completed_count BIGINT NOT NULL,
    failed_count BIGINT NOT NULL,
    cancelled_count BIGINT NOT NULL,
    rejected_count BIGINT NOT NULL,
    unknown_count BIGINT NOT NULL,
    retried_count BIGINT NOT NULL,
    prompt_tokens BIGINT NOT NULL,
    cached_prompt_tokens BIGINT NOT NULL,
    completion_tokens BIGINT NOT NULL,
    unknown_tokens_count BIGINT NOT NULL,
    gpu_nanoseconds BIGINT NOT NULL,
    unknown_gpu_count BIGINT NOT NULL,
    remote_count BIGINT NOT NULL,
    remote_prompt_tokens BIGINT NOT NULL,
    remote_completion_tokens BIGINT NOT NULL,
    energy_millijoules BIGINT DEFAULT 0 NOT NULL,
    measured_energy_count BIGINT DEFAULT 0 NOT NULL,
    image_steps BIGINT DEFAULT 0 NOT NULL,
    image_pixels BIGINT DEFAULT 0 NOT NULL,
    audio_milliseconds BIGINT DEFAULT 0 NOT NULL
);

CREATE TABLE router_leader (
    id INTEGER NOT NULL,
    owner VARCHAR(64) NOT NULL,
    address VARCHAR(512),
    backend_pid INTEGER,
    beat BIGINT,
    beat_at TIMESTAMP WITH TIME ZONE,
    CONSTRAINT pk_router_leader PRIMARY KEY (id)
);

CREATE TABLE request_records (
    incarnation VARCHAR(128) NOT NULL,
    key BIGINT NOT NULL,
    router VARCHAR(128) NOT NULL,
    number BIGINT NOT NULL,
    request_id VARCHAR(128) NOT NULL,
    tenant VARCHAR(128) NOT NULL,
    client_id VARCHAR(128) NOT NULL,
    target VARCHAR(320) NOT NULL,
    asked_model VARCHAR(320) NOT NULL,
    priority SMALLINT NOT NULL,
    arrived_at DOUBLE PRECISION NOT NULL,
    ended_at DOUBLE PRECISION,
    reason SMALLINT NOT NULL,
    message TEXT NOT NULL,
    cancelled_by TEXT NOT NULL,
    decisions BYTEA NOT NULL,
    receipt BYTEA,
    CONSTRAINT pk_request_records PRIMARY KEY (incarnation, key)
);
CREATE INDEX ix_request_records_request_id ON request_records (request_id);
CREATE INDEX ix_request_records_open ON request_records (incarnation, router) WHERE ended_at IS NULL;
CREATE INDEX ix_request_records_ended_at ON request_records (ended_at, router, number, reason);
CREATE INDEX ix_request_records_tenant ON request_records (tenant, ended_at, router, number, reason);

CREATE TABLE router_beats (
    incarnation VARCHAR(128) NOT NULL,
    router VARCHAR(128) NOT NULL,
    beat_at DOUBLE PRECISION NOT NULL,
    CONSTRAINT pk_router_beats PRIMARY KEY (incarnation)
);

CREATE TABLE fair_accounts (
    router VARCHAR(128) NOT NULL,
    tenant VARCHAR(128) NOT NULL,
    incarnation VARCHAR(128) NOT NULL,
    tokens DOUBLE PRECISION NOT NULL,
    mean_cost DOUBLE PRECISION,
    is_active BOOLEAN NOT NULL,
    saved_at DOUBLE PRECISION NOT NULL,
    CONSTRAINT pk_fair_accounts PRIMARY KEY (router, tenant)
);

CREATE TABLE known_clients (
    router VARCHAR(128) NOT NULL,
    tenant VARCHAR(128) NOT NULL,
    client_id VARCHAR(128) NOT NULL,
    last_seen_at DOUBLE PRECISION NOT NULL,
    cooldown_seconds DOUBLE PRECISION NOT NULL,
    record BYTEA NOT NULL,
    CONSTRAINT pk_known_clients PRIMARY KEY (router, tenant, client_id)
);

CREATE TABLE figure_steps (
    router VARCHAR(128) NOT NULL,
    begins_at DOUBLE PRECISION NOT NULL,
    seconds DOUBLE PRECISION NOT NULL,
    step BYTEA NOT NULL,
    CONSTRAINT pk_figure_steps PRIMARY KEY (router, begins_at)
);

CREATE TABLE task_specs (
    task_id VARCHAR(128) NOT NULL,
    spec BYTEA NOT NULL,
    CONSTRAINT pk_task_specs PRIMARY KEY (task_id),
    CONSTRAINT fk_task_specs_task_id FOREIGN KEY (task_id) REFERENCES tasks (id) ON DELETE CASCADE
);

CREATE TABLE task_attempts (
    task_id VARCHAR(128) NOT NULL,
    attempt INTEGER NOT NULL,
    owner VARCHAR(128) NOT NULL,
    claimed_at DOUBLE PRECISION NOT NULL,
    ended_at DOUBLE PRECISION,
    reason SMALLINT NOT NULL,
    message TEXT NOT NULL,
    receipt BYTEA NOT NULL,
    CONSTRAINT pk_task_attempts PRIMARY KEY (task_id, attempt),
    CONSTRAINT fk_task_attempts_task_id FOREIGN KEY (task_id) REFERENCES tasks (id) ON DELETE CASCADE
);

CREATE TABLE task_pieces (
    task_id VARCHAR(128) NOT NULL,
    attempt INTEGER NOT NULL,
    first_index INTEGER NOT NULL,
    event_count INTEGER NOT NULL,
    output BYTEA NOT NULL,
    CONSTRAINT pk_task_pieces PRIMARY KEY (task_id, attempt, first_index),
    CONSTRAINT fk_task_pieces_task_id FOREIGN KEY (task_id) REFERENCES tasks (id) ON DELETE CASCADE
);

CREATE TABLE file_pieces (
    file_id VARCHAR(128) NOT NULL,
    place INTEGER NOT NULL,
    data BYTEA NOT NULL,
    CONSTRAINT pk_file_pieces PRIMARY KEY (file_id, place),
    CONSTRAINT fk_file_pieces_file_id FOREIGN KEY (file_id) REFERENCES files (id) ON DELETE CASCADE
);
