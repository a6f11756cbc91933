-- A role for Grafana on the control plane's database: it may read what the dashboard of stored steps shows,
-- and nothing that holds a token. Run once, as the owner of the tables, after Slotline has started; then give the
-- role a password of your own: ALTER ROLE slotline_reader LOGIN PASSWORD '...';
CREATE ROLE slotline_reader NOLOGIN;
GRANT USAGE ON SCHEMA public TO slotline_reader;
GRANT SELECT (id, name, state, created_at) ON jobs TO slotline_reader;
GRANT SELECT (job_id, attempt, body) ON plans TO slotline_reader;
GRANT SELECT ON steps, timelines, slots TO slotline_reader;
