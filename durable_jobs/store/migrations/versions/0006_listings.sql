-- {s} stands for the schema.

-- Without these a page of an organization's jobs was looked for among all rows, and its queued ones among all that ended:
-- 60 ms beside 100,000 completed rows, in place of 7.
CREATE INDEX jobs_organization ON {s}.jobs (organization_id, id);
CREATE INDEX jobs_organization_status ON {s}.jobs (organization_id, status, id);
