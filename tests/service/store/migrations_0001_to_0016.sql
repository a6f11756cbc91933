-- What migrations 0001 to 0016, which one migration has replaced, executed on an empty database.
-- $time, $double, $bytes and $serial are the dialect's types: see chain_statements in test_upgrades.py.
CREATE TABLE alembic_version (
    version_num VARCHAR(32) NOT NULL,
    CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
CREATE TABLE jobs (
    id VARCHAR(40) NOT NULL,
    name VARCHAR(100) NOT NULL,
    queue VARCHAR(100) NOT NULL,
    priority INTEGER NOT NULL,
    accelerators INTEGER NOT NULL,
    device VARCHAR(10) NOT NULL,
    spec JSON NOT NULL,
    state VARCHAR(20) NOT NULL,
    reason VARCHAR(100),
    message TEXT,
    created_at $time NOT NULL,
    started_at $time,
    finished_at $time,
    queued_at $time NOT NULL,
    not_before $time,
    cancel_requested_at $time,
    idempotency_key VARCHAR(255),
    request_digest VARCHAR(64),
    current_attempt VARCHAR(60),
    attempts_made INTEGER NOT NULL,
    attempts_forgiven INTEGER NOT NULL,
    last_event INTEGER NOT NULL,
    step INTEGER,
    loss $double,
    step_s $double,
    checkpoint_step INTEGER,
    checkpoint_uri TEXT,
    CONSTRAINT pk_jobs PRIMARY KEY (id),
    CONSTRAINT uq_jobs_idempotency_key UNIQUE (idempotency_key)
);
CREATE INDEX ix_jobs_created ON jobs (created_at, id);
CREATE INDEX ix_jobs_state_queue ON jobs (state, queue);
CREATE TABLE packages (
    digest VARCHAR(64) NOT NULL,
    created_at $time NOT NULL,
    size_bytes BIGINT NOT NULL,
    content $bytes NOT NULL,
    CONSTRAINT pk_packages PRIMARY KEY (digest)
);
CREATE TABLE profiles (
    "key" VARCHAR(300) NOT NULL,
    created_at $time NOT NULL,
    body JSON NOT NULL,
    CONSTRAINT pk_profiles PRIMARY KEY ("key")
);
CREATE TABLE tokens (
    name VARCHAR(100) NOT NULL,
    digest VARCHAR(64) NOT NULL,
    created_at $time NOT NULL,
    CONSTRAINT pk_tokens PRIMARY KEY (name),
    CONSTRAINT uq_tokens_digest UNIQUE (digest)
);
CREATE TABLE attempts (
    id VARCHAR(60) NOT NULL,
    job_id VARCHAR(40) NOT NULL,
    number INTEGER NOT NULL,
    state VARCHAR(20) NOT NULL,
    reason VARCHAR(100),
    message TEXT,
    token VARCHAR(100) NOT NULL,
    device VARCHAR(10) NOT NULL,
    accelerators INTEGER NOT NULL,
    created_at $time NOT NULL,
    submitted_at $time,
    started_at $time,
    finished_at $time,
    heartbeat_at $time,
    last_sequence BIGINT NOT NULL,
    metrics_endpoint VARCHAR(300),
    log TEXT,
    log_first_line INTEGER NOT NULL,
    CONSTRAINT pk_attempts PRIMARY KEY (id),
    CONSTRAINT fk_attempts_job_id FOREIGN KEY(job_id) REFERENCES jobs (id),
    CONSTRAINT uq_attempts_job_id_number UNIQUE (job_id, number)
);
CREATE INDEX ix_attempts_state ON attempts (state);
CREATE TABLE events (
    job_id VARCHAR(40) NOT NULL,
    number INTEGER NOT NULL,
    at $time NOT NULL,
    attempt INTEGER,
    kind VARCHAR(100) NOT NULL,
    message TEXT NOT NULL,
    CONSTRAINT pk_events PRIMARY KEY (job_id, number),
    CONSTRAINT fk_events_job_id FOREIGN KEY(job_id) REFERENCES jobs (id)
);
CREATE TABLE plans (
    job_id VARCHAR(40) NOT NULL,
    attempt INTEGER NOT NULL,
    created_at $time NOT NULL,
    body TEXT NOT NULL,
    CONSTRAINT pk_plans PRIMARY KEY (job_id),
    CONSTRAINT fk_plans_job_id FOREIGN KEY(job_id) REFERENCES jobs (id)
);
CREATE TABLE slots (
    id $serial NOT NULL,
    job_id VARCHAR(40) NOT NULL,
    step INTEGER NOT NULL,
    mesh VARCHAR(100) NOT NULL,
    lane VARCHAR(120) NOT NULL,
    action VARCHAR(20) NOT NULL,
    stage VARCHAR(100),
    peer_stage VARCHAR(100),
    peer_mesh VARCHAR(100),
    edge INTEGER,
    microbatch INTEGER,
    start_s $double NOT NULL,
    end_s $double NOT NULL,
    CONSTRAINT pk_slots PRIMARY KEY (id),
    CONSTRAINT fk_slots_job_id FOREIGN KEY(job_id) REFERENCES jobs (id)
);
CREATE INDEX ix_slots_job_step ON slots (job_id, step);
CREATE TABLE steps (
    job_id VARCHAR(40) NOT NULL,
    step INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    loss $double,
    step_s $double,
    makespan_s $double,
    bubble_ratio $double,
    exposed_transfer_s $double,
    overlap_ratio $double,
    grad_norm $double,
    started_at $double,
    CONSTRAINT pk_steps PRIMARY KEY (job_id, step),
    CONSTRAINT fk_steps_job_id FOREIGN KEY(job_id) REFERENCES jobs (id)
);
CREATE TABLE timelines (
    job_id VARCHAR(40) NOT NULL,
    step INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    started_at $double NOT NULL,
    uncertainty_s $double,
    CONSTRAINT pk_timelines PRIMARY KEY (job_id, step),
    CONSTRAINT fk_timelines_job_id FOREIGN KEY(job_id) REFERENCES jobs (id)
);
INSERT INTO alembic_version (version_num) VALUES ('0001');
ALTER TABLE attempts ADD COLUMN peak_memory_bytes JSON;
UPDATE alembic_version SET version_num='0002' WHERE alembic_version.version_num = '0001';
ALTER TABLE jobs ADD COLUMN steps_wanted INTEGER DEFAULT '0' NOT NULL;
ALTER TABLE jobs ADD COLUMN workers_per_mesh INTEGER DEFAULT '1' NOT NULL;
ALTER TABLE jobs ADD COLUMN infrastructure_forgiven INTEGER DEFAULT '0' NOT NULL;
UPDATE alembic_version SET version_num='0003' WHERE alembic_version.version_num = '0002';
CREATE TABLE pulses (
    name VARCHAR(100) NOT NULL,
    at $time NOT NULL,
    CONSTRAINT pk_pulses PRIMARY KEY (name)
);
ALTER TABLE attempts ADD COLUMN stopped_because TEXT;
ALTER TABLE tokens ADD COLUMN expires_at $time;
UPDATE alembic_version SET version_num='0004' WHERE alembic_version.version_num = '0003';
ALTER TABLE tokens ADD COLUMN role VARCHAR(20) DEFAULT 'operator' NOT NULL;
ALTER TABLE jobs ADD COLUMN owner VARCHAR(200) DEFAULT '' NOT NULL;
CREATE INDEX ix_jobs_owner_created ON jobs (owner, created_at);
ALTER TABLE events ADD COLUMN principal VARCHAR(200);
CREATE TABLE package_owners (
    digest VARCHAR(64) NOT NULL,
    owner VARCHAR(200) NOT NULL,
    CONSTRAINT pk_package_owners PRIMARY KEY (digest, owner),
    CONSTRAINT fk_package_owners_digest_packages FOREIGN KEY(digest) REFERENCES packages (digest) ON DELETE CASCADE
);
CREATE TABLE secrets (
    owner VARCHAR(200) NOT NULL,
    name VARCHAR(128) NOT NULL,
    sealed TEXT NOT NULL,
    set_at $time NOT NULL,
    CONSTRAINT pk_secrets PRIMARY KEY (owner, name)
);
CREATE TABLE audit (
    number $serial NOT NULL,
    at $time NOT NULL,
    principal VARCHAR(200) NOT NULL,
    action VARCHAR(100) NOT NULL,
    subject VARCHAR(200) NOT NULL,
    detail TEXT NOT NULL,
    CONSTRAINT pk_audit PRIMARY KEY (number)
);
UPDATE alembic_version SET version_num='0005' WHERE alembic_version.version_num = '0004';
CREATE TABLE post_mortems (
    attempt_id VARCHAR(60) NOT NULL,
    job_id VARCHAR(40) NOT NULL,
    at $time NOT NULL,
    "plan" TEXT,
    step INTEGER,
    slots TEXT,
    CONSTRAINT pk_post_mortems PRIMARY KEY (attempt_id),
    CONSTRAINT fk_post_mortems_attempt_id_attempts FOREIGN KEY(attempt_id) REFERENCES attempts (id),
    CONSTRAINT fk_post_mortems_job_id_jobs FOREIGN KEY(job_id) REFERENCES jobs (id)
);
ALTER TABLE jobs ADD COLUMN traceparent VARCHAR(55);
CREATE INDEX ix_post_mortems_job_id ON post_mortems (job_id);
UPDATE alembic_version SET version_num='0006' WHERE alembic_version.version_num = '0005';
ALTER TABLE jobs ADD COLUMN metrics JSON;
ALTER TABLE jobs ADD COLUMN best_checkpoint JSON;
ALTER TABLE steps ADD COLUMN metrics JSON;
CREATE TABLE evaluations (
    job_id VARCHAR(40) NOT NULL,
    step INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    loss $double,
    metrics JSON,
    samples INTEGER NOT NULL,
    evaluation_s $double,
    started_at $double,
    CONSTRAINT pk_evaluations PRIMARY KEY (job_id, step),
    CONSTRAINT fk_evaluations_job_id FOREIGN KEY(job_id) REFERENCES jobs (id)
);
UPDATE alembic_version SET version_num='0007' WHERE alembic_version.version_num = '0006';
ALTER TABLE jobs ADD COLUMN labels JSON;
ALTER TABLE jobs ADD COLUMN max_duration_s $double;
ALTER TABLE jobs ADD COLUMN held_s $double DEFAULT '0' NOT NULL;
ALTER TABLE attempts ADD COLUMN end_asked_at $time;
ALTER TABLE attempts ADD COLUMN end_asked_for VARCHAR(100);
CREATE TABLE job_labels (
    job_id VARCHAR(40) NOT NULL,
    name VARCHAR(63) NOT NULL,
    value VARCHAR(63) NOT NULL,
    CONSTRAINT pk_job_labels PRIMARY KEY (job_id, name),
    CONSTRAINT fk_job_labels_job_id_jobs FOREIGN KEY(job_id) REFERENCES jobs (id)
);
CREATE INDEX ix_job_labels_name_value ON job_labels (name, value, job_id);
CREATE INDEX ix_jobs_state_created ON jobs (state, created_at, id);
CREATE INDEX ix_jobs_queue_created ON jobs (queue, created_at, id);
CREATE INDEX ix_jobs_name_created ON jobs (name, created_at, id);
UPDATE alembic_version SET version_num='0008' WHERE alembic_version.version_num = '0007';
CREATE TABLE leases (
    name VARCHAR(100) NOT NULL,
    holder VARCHAR(200) NOT NULL,
    token BIGINT NOT NULL,
    taken_at $double NOT NULL,
    expires_at $double NOT NULL,
    CONSTRAINT pk_leases PRIMARY KEY (name)
);
CREATE TABLE compatibility (
    oldest_code VARCHAR(32) NOT NULL,
    CONSTRAINT pk_compatibility PRIMARY KEY (oldest_code)
);
INSERT INTO compatibility (oldest_code) VALUES ('0008');
UPDATE alembic_version SET version_num='0009' WHERE alembic_version.version_num = '0008';
ALTER TABLE jobs ADD COLUMN notifications JSON;
CREATE TABLE deliveries (
    id VARCHAR(40) NOT NULL,
    job_id VARCHAR(40) NOT NULL,
    event INTEGER NOT NULL,
    job_state VARCHAR(20) NOT NULL,
    url TEXT NOT NULL,
    host VARCHAR(300) NOT NULL,
    secret VARCHAR(128),
    body TEXT NOT NULL,
    state VARCHAR(20) NOT NULL,
    tries INTEGER NOT NULL,
    created_at $time NOT NULL,
    next_at $time NOT NULL,
    last_at $time,
    status INTEGER,
    error TEXT,
    CONSTRAINT pk_deliveries PRIMARY KEY (id),
    CONSTRAINT fk_deliveries_job_id_jobs FOREIGN KEY(job_id) REFERENCES jobs (id)
);
CREATE INDEX ix_deliveries_due ON deliveries (state, next_at);
CREATE INDEX ix_deliveries_job ON deliveries (job_id, event);
UPDATE alembic_version SET version_num='0010' WHERE alembic_version.version_num = '0009';
CREATE TABLE queue_quotas (
    queue VARCHAR(100) NOT NULL,
    quota INTEGER,
    set_at $time NOT NULL,
    CONSTRAINT pk_queue_quotas PRIMARY KEY (queue)
);
UPDATE alembic_version SET version_num='0011' WHERE alembic_version.version_num = '0010';
ALTER TABLE attempts ADD COLUMN cluster VARCHAR(100) DEFAULT 'default' NOT NULL;
ALTER TABLE jobs ADD COLUMN cluster VARCHAR(100);
UPDATE alembic_version SET version_num='0012' WHERE alembic_version.version_num = '0011';
CREATE TABLE named_plans (
    id VARCHAR(40) NOT NULL,
    owner VARCHAR(200) NOT NULL,
    name VARCHAR(100),
    created_at $time NOT NULL,
    used_at $time NOT NULL,
    request_digest VARCHAR(64) NOT NULL,
    measured_by VARCHAR(20) NOT NULL,
    size_bytes BIGINT NOT NULL,
    summary JSON NOT NULL,
    made_for TEXT NOT NULL,
    body TEXT NOT NULL,
    CONSTRAINT pk_named_plans PRIMARY KEY (id),
    CONSTRAINT uq_named_plans_owner_name UNIQUE (owner, name)
);
ALTER TABLE jobs ADD COLUMN given_plan VARCHAR(40);
CREATE INDEX ix_jobs_given_plan ON jobs (given_plan);
UPDATE alembic_version SET version_num='0013' WHERE alembic_version.version_num = '0012';
CREATE TABLE storage_uses (
    id VARCHAR(40) NOT NULL,
    job_id VARCHAR(40) NOT NULL,
    kind VARCHAR(20) NOT NULL,
    folders JSON,
    until $time NOT NULL,
    CONSTRAINT pk_storage_uses PRIMARY KEY (id),
    CONSTRAINT fk_storage_uses_job_id_jobs FOREIGN KEY(job_id) REFERENCES jobs (id)
);
CREATE INDEX ix_storage_uses_job_id ON storage_uses (job_id);
ALTER TABLE jobs ADD COLUMN stored_bytes BIGINT;
ALTER TABLE jobs ADD COLUMN files_removed_at $time;
UPDATE alembic_version SET version_num='0014' WHERE alembic_version.version_num = '0013';
ALTER TABLE jobs ADD COLUMN step_flops $double;
ALTER TABLE jobs ADD COLUMN peak_flops_per_s $double;
UPDATE alembic_version SET version_num='0015' WHERE alembic_version.version_num = '0014';
CREATE TABLE short_runs (
    "key" VARCHAR(100) NOT NULL,
    holder VARCHAR(200) NOT NULL,
    beat_at $double NOT NULL,
    ended BOOLEAN NOT NULL,
    answer TEXT,
    failure TEXT,
    CONSTRAINT pk_short_runs PRIMARY KEY ("key")
);
UPDATE alembic_version SET version_num='0016' WHERE alembic_version.version_num = '0015';
