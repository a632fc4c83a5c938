-- Usage is divided by what coding agents say of their requests, too. Older rows say nothing.
ALTER TABLE usage_entries ADD COLUMN program VARCHAR(128) DEFAULT '' NOT NULL;
ALTER TABLE usage_entries ADD COLUMN agent VARCHAR(128) DEFAULT '' NOT NULL;
ALTER TABLE usage_entries ADD COLUMN purpose VARCHAR(128) DEFAULT '' NOT NULL;
ALTER TABLE usage_hours RENAME TO undivided_usage_hours;
CREATE TABLE usage_hours (
    hour INTEGER NOT NULL,
    tenant VARCHAR(128) NOT NULL,
    key VARCHAR(128) NOT NULL,
    model VARCHAR(320) NOT NULL,
    asked VARCHAR(320) NOT NULL,
    program VARCHAR(128) NOT NULL,
    agent VARCHAR(128) NOT NULL,
    purpose VARCHAR(128) NOT NULL,
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
    price_nanodollars BIGINT DEFAULT 0 NOT NULL,
    priced_count BIGINT DEFAULT 0 NOT NULL,
    CONSTRAINT pk_divided_usage_hours PRIMARY KEY (hour, tenant, key, model, asked, program, agent, purpose)
);
INSERT INTO usage_hours (
    hour, tenant, key, model, asked, completed_count, failed_count, cancelled_count, rejected_count, unknown_count,
    retried_count, prompt_tokens, cached_prompt_tokens, completion_tokens, unknown_tokens_count, gpu_nanoseconds,
    unknown_gpu_count, remote_count, remote_prompt_tokens, remote_completion_tokens, energy_millijoules,
    measured_energy_count, image_steps, image_pixels, audio_milliseconds, price_nanodollars, priced_count, program,
    agent, purpose
)
SELECT
    hour, tenant, key, model, asked, completed_count, failed_count, cancelled_count, rejected_count, unknown_count,
    retried_count, prompt_tokens, cached_prompt_tokens, completion_tokens, unknown_tokens_count, gpu_nanoseconds,
    unknown_gpu_count, remote_count, remote_prompt_tokens, remote_completion_tokens, energy_millijoules,
    measured_energy_count, image_steps, image_pixels, audio_milliseconds, price_nanodollars, priced_count, '', '', ''
FROM undivided_usage_hours;
DROP TABLE undivided_usage_hours;
