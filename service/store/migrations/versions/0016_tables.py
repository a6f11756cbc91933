"""All tables; the one migration, which starts from nothing.

Databases at revision 0016 that sixteen migrations made before have the same tables, and are taken over as they are.
"""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("queue", sa.String(100), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("accelerators", sa.Integer(), nullable=False),
        sa.Column("workers_per_mesh", sa.Integer(), nullable=False, server_default="1"),
        sa.Column("device", sa.String(10), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("steps_wanted", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("state", sa.String(20), nullable=False),
        sa.Column("reason", sa.String(100), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("queued_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("not_before", sa.DateTime(timezone=True), nullable=True),
        sa.Column("cancel_requested_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("owner", sa.String(200), nullable=False, server_default=""),
        sa.Column("idempotency_key", sa.String(255), nullable=True),
        sa.Column("request_digest", sa.String(64), nullable=True),
        sa.Column("current_attempt", sa.String(60), nullable=True),
        sa.Column("attempts_made", sa.Integer(), nullable=False),
        sa.Column("attempts_forgiven", sa.Integer(), nullable=False),
        sa.Column("infrastructure_forgiven", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("last_event", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=True),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("metrics", sa.JSON(), nullable=True),
        sa.Column("step_s", sa.Double(), nullable=True),
        sa.Column("checkpoint_step", sa.Integer(), nullable=True),
        sa.Column("checkpoint_uri", sa.Text(), nullable=True),
        sa.Column("labels", sa.JSON(), nullable=True),
        sa.Column("notifications", sa.JSON(), nullable=True),
        sa.Column("max_duration_s", sa.Double(), nullable=True),
        sa.Column("held_s", sa.Double(), nullable=False, server_default="0"),
        sa.Column("best_checkpoint", sa.JSON(), nullable=True),
        sa.Column("traceparent", sa.String(55), nullable=True),
        sa.Column("cluster", sa.String(100), nullable=True),
        sa.Column("given_plan", sa.String(40), nullable=True),
        sa.Column("stored_bytes", sa.BigInteger(), nullable=True),
        sa.Column("step_flops", sa.Double(), nullable=True),
        sa.Column("peak_flops_per_s", sa.Double(), nullable=True),
        sa.Column("files_removed_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
        sa.UniqueConstraint("idempotency_key", name="uq_jobs_idempotency_key"),
    )
    op.create_index("ix_jobs_created", "jobs", ["created_at", "id"])
    op.create_index("ix_jobs_given_plan", "jobs", ["given_plan"])
    op.create_index("ix_jobs_name_created", "jobs", ["name", "created_at", "id"])
    op.create_index("ix_jobs_owner_created", "jobs", ["owner", "created_at"])
    op.create_index("ix_jobs_queue_created", "jobs", ["queue", "created_at", "id"])
    op.create_index("ix_jobs_state_created", "jobs", ["state", "created_at", "id"])
    op.create_index("ix_jobs_state_queue", "jobs", ["state", "queue"])
    op.create_table(
        "attempts",
        sa.Column("id", sa.String(60), nullable=False),
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(20), nullable=False),
        sa.Column("reason", sa.String(100), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("token", sa.String(100), nullable=False),
        sa.Column("device", sa.String(10), nullable=False),
        sa.Column("accelerators", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("submitted_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("heartbeat_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_sequence", sa.BigInteger(), nullable=False),
        sa.Column("metrics_endpoint", sa.String(300), nullable=True),
        sa.Column("peak_memory_bytes", sa.JSON(), nullable=True),
        sa.Column("log", sa.Text(), nullable=True),
        sa.Column("log_first_line", sa.Integer(), nullable=False),
        sa.Column("stopped_because", sa.Text(), nullable=True),
        sa.Column("end_asked_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("end_asked_for", sa.String(100), nullable=True),
        sa.Column("cluster", sa.String(100), nullable=False, server_default="default"),
        sa.PrimaryKeyConstraint("id", name="pk_attempts"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_attempts_job_id"),
        sa.UniqueConstraint("job_id", "number", name="uq_attempts_job_id_number"),
    )
    op.create_index("ix_attempts_state", "attempts", ["state"])
    op.create_table(
        "job_labels",
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("value", sa.String(63), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "name", name="pk_job_labels"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_job_labels_job_id_jobs"),
    )
    op.create_index("ix_job_labels_name_value", "job_labels", ["name", "value", "job_id"])
    op.create_table(
        "events",
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=True),
        sa.Column("kind", sa.String(100), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("principal", sa.String(200), nullable=True),
        sa.PrimaryKeyConstraint("job_id", "number", name="pk_events"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_events_job_id"),
    )
    op.create_table(
        "steps",
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("step_s", sa.Double(), nullable=True),
        sa.Column("makespan_s", sa.Double(), nullable=True),
        sa.Column("bubble_ratio", sa.Double(), nullable=True),
        sa.Column("exposed_transfer_s", sa.Double(), nullable=True),
        sa.Column("overlap_ratio", sa.Double(), nullable=True),
        sa.Column("grad_norm", sa.Double(), nullable=True),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("metrics", sa.JSON(), nullable=True),
        sa.PrimaryKeyConstraint("job_id", "step", name="pk_steps"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_steps_job_id"),
    )
    op.create_table(
        "evaluations",
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("metrics", sa.JSON(), nullable=True),
        sa.Column("samples", sa.Integer(), nullable=False),
        sa.Column("evaluation_s", sa.Double(), nullable=True),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("job_id", "step", name="pk_evaluations"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_evaluations_job_id"),
    )
    op.create_table(
        "plans",
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", name="pk_plans"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_plans_job_id"),
    )
    op.create_table(
        "timelines",
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("uncertainty_s", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("job_id", "step", name="pk_timelines"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_timelines_job_id"),
    )
    op.create_table(
        "slots",
        sa.Column(
            "id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False, autoincrement=True
        ),
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("mesh", sa.String(100), nullable=False),
        sa.Column("lane", sa.String(120), nullable=False),
        sa.Column("action", sa.String(20), nullable=False),
        sa.Column("stage", sa.String(100), nullable=True),
        sa.Column("peer_stage", sa.String(100), nullable=True),
        sa.Column("peer_mesh", sa.String(100), nullable=True),
        sa.Column("edge", sa.Integer(), nullable=True),
        sa.Column("microbatch", sa.Integer(), nullable=True),
        sa.Column("start_s", sa.Double(), nullable=False),
        sa.Column("end_s", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_slots"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_slots_job_id"),
    )
    op.create_index("ix_slots_job_step", "slots", ["job_id", "step"])
    op.create_table(
        "post_mortems",
        sa.Column("attempt_id", sa.String(60), nullable=False),
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("plan", sa.Text(), nullable=True),
        sa.Column("step", sa.Integer(), nullable=True),
        sa.Column("slots", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("attempt_id", name="pk_post_mortems"),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name="fk_post_mortems_attempt_id_attempts"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_post_mortems_job_id_jobs"),
    )
    op.create_index("ix_post_mortems_job_id", "post_mortems", ["job_id"])
    op.create_table(
        "deliveries",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("event", sa.Integer(), nullable=False),
        sa.Column("job_state", sa.String(20), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("host", sa.String(300), nullable=False),
        sa.Column("secret", sa.String(128), nullable=True),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("state", sa.String(20), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("next_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_deliveries"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_deliveries_job_id_jobs"),
    )
    op.create_index("ix_deliveries_due", "deliveries", ["state", "next_at"])
    op.create_index("ix_deliveries_job", "deliveries", ["job_id", "event"])
    op.create_table(
        "storage_uses",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("folders", sa.JSON(), nullable=True),
        sa.Column("until", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_storage_uses"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_storage_uses_job_id_jobs"),
    )
    op.create_index("ix_storage_uses_job_id", "storage_uses", ["job_id"])
    op.create_table(
        "packages",
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_packages"),
    )
    op.create_table(
        "package_owners",
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("owner", sa.String(200), nullable=False),
        sa.PrimaryKeyConstraint("digest", "owner", name="pk_package_owners"),
        sa.ForeignKeyConstraint(
            ["digest"], ["packages.digest"], name="fk_package_owners_digest_packages", ondelete="CASCADE"
        ),
    )
    op.create_table(
        "named_plans",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("owner", sa.String(200), nullable=False),
        sa.Column("name", sa.String(100), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("used_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("request_digest", sa.String(64), nullable=False),
        sa.Column("measured_by", sa.String(20), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("summary", sa.JSON(), nullable=False),
        sa.Column("made_for", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_named_plans"),
        sa.UniqueConstraint("owner", "name", name="uq_named_plans_owner_name"),
    )
    op.create_table(
        "profiles",
        sa.Column("key", sa.String(300), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("body", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_profiles"),
    )
    op.create_table(
        "tokens",
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("role", sa.String(20), nullable=False, server_default="operator"),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("name", name="pk_tokens"),
        sa.UniqueConstraint("digest", name="uq_tokens_digest"),
    )
    op.create_table(
        "secrets",
        sa.Column("owner", sa.String(200), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("sealed", sa.Text(), nullable=False),
        sa.Column("set_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("owner", "name", name="pk_secrets"),
    )
    op.create_table(
        "audit",
        sa.Column(
            "number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False, autoincrement=True
        ),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("principal", sa.String(200), nullable=False),
        sa.Column("action", sa.String(100), nullable=False),
        sa.Column("subject", sa.String(200), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_audit"),
    )
    op.create_table(
        "queue_quotas",
        sa.Column("queue", sa.String(100), nullable=False),
        sa.Column("quota", sa.Integer(), nullable=True),
        sa.Column("set_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("queue", name="pk_queue_quotas"),
    )
    op.create_table(
        "leases",
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("holder", sa.String(200), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("taken_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_leases"),
    )
    op.create_table(
        "pulses",
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_pulses"),
    )
    op.create_table(
        "short_runs",
        sa.Column("key", sa.String(100), nullable=False),
        sa.Column("holder", sa.String(200), nullable=False),
        sa.Column("beat_at", sa.Double(), nullable=False),
        sa.Column("ended", sa.Boolean(), nullable=False),
        sa.Column("answer", sa.Text(), nullable=True),
        sa.Column("failure", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("key", name="pk_short_runs"),
    )
    op.create_table(
        "compatibility",
        sa.Column("oldest_code", sa.String(32), nullable=False),
        sa.PrimaryKeyConstraint("oldest_code", name="pk_compatibility"),
    )
    # code of 0008 and later works with these tables, which a rollback of a control plane relies on
    op.execute("INSERT INTO compatibility (oldest_code) VALUES ('0008')")
