CREATE TABLE journal_owner (
	name TEXT NOT NULL, 
	CONSTRAINT pk_journal_owner PRIMARY KEY (name)
);
-- next
CREATE TABLE ledger_entries (
	seq BIGINT NOT NULL, 
	at TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	account TEXT NOT NULL, 
	level TEXT NOT NULL, 
	reservation_id TEXT NOT NULL, 
	amount BIGINT NOT NULL, 
	detail TEXT NOT NULL, 
	previous_hash TEXT NOT NULL, 
	hash TEXT NOT NULL, 
	CONSTRAINT pk_ledger_entries PRIMARY KEY (seq), 
	CONSTRAINT ck_ledger_entries_seq CHECK (seq >= 1), 
	CONSTRAINT ck_ledger_entries_kind CHECK (kind IN ('answer', 'cap', 'open', 'post', 'reserve', 'void')), 
	CONSTRAINT ck_ledger_entries_level CHECK (level IN ('agent', 'instance')), 
	CONSTRAINT ck_ledger_entries_amount CHECK (amount >= 0)
);
-- next
CREATE INDEX ix_ledger_entries_account_level_seq ON ledger_entries (account, level, seq);
-- next
CREATE OR REPLACE FUNCTION ledger_entries_stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF TRUE THEN RAISE EXCEPTION 'ledger entries are append-only' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER ledger_entries_stay BEFORE UPDATE ON ledger_entries FOR EACH ROW EXECUTE FUNCTION ledger_entries_stay();
-- next
CREATE OR REPLACE FUNCTION ledger_entries_remain() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF TRUE THEN RAISE EXCEPTION 'ledger entries are append-only' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN OLD; END $$;
-- next
CREATE TRIGGER ledger_entries_remain BEFORE DELETE ON ledger_entries FOR EACH ROW EXECUTE FUNCTION ledger_entries_remain();
-- next
CREATE OR REPLACE FUNCTION ledger_entries_remain_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'ledger entries are append-only' USING ERRCODE = 'integrity_constraint_violation'; END $$;
-- next
CREATE TRIGGER ledger_entries_remain_all BEFORE TRUNCATE ON ledger_entries FOR EACH STATEMENT EXECUTE FUNCTION ledger_entries_remain_all();
-- next
CREATE OR REPLACE FUNCTION ledger_entries_follow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.seq <> (SELECT coalesce(max(seq), 0) + 1 FROM ledger_entries) THEN RAISE EXCEPTION 'ledger entries have no gaps' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER ledger_entries_follow BEFORE INSERT ON ledger_entries FOR EACH ROW EXECUTE FUNCTION ledger_entries_follow();
-- next
CREATE TABLE ledger_accounts (
	account TEXT NOT NULL, 
	level TEXT NOT NULL, 
	cap BIGINT, 
	spent BIGINT NOT NULL, 
	posted BIGINT NOT NULL, 
	CONSTRAINT pk_ledger_accounts PRIMARY KEY (account, level), 
	CONSTRAINT ck_ledger_accounts_level CHECK (level IN ('agent', 'instance')), 
	CONSTRAINT ck_ledger_accounts_cap CHECK (cap IS NULL OR cap >= 0), 
	CONSTRAINT ck_ledger_accounts_never_overspent CHECK (spent >= 0 AND (cap IS NULL OR spent <= cap)), 
	CONSTRAINT ck_ledger_accounts_posted CHECK (posted >= 0 AND posted <= spent)
);
-- next
CREATE TABLE ledger_reservations (
	reservation_id TEXT NOT NULL, 
	state TEXT NOT NULL, 
	first_seq BIGINT NOT NULL, 
	charges BIGINT NOT NULL, 
	settled_seq BIGINT, 
	CONSTRAINT pk_ledger_reservations PRIMARY KEY (reservation_id), 
	CONSTRAINT ck_ledger_reservations_state CHECK (state IN ('reserved', 'posted', 'void')), 
	CONSTRAINT ck_ledger_reservations_settled CHECK ((state = 'reserved') = (settled_seq IS NULL))
);
-- next
CREATE INDEX ix_ledger_reservations_reserved ON ledger_reservations (reservation_id) WHERE state = 'reserved';
-- next
CREATE TABLE tasks (
	digest TEXT NOT NULL, 
	body TEXT NOT NULL, 
	participants TEXT NOT NULL, 
	max_queries BIGINT NOT NULL, 
	next_query BIGINT NOT NULL, 
	created_at TEXT NOT NULL, 
	created_by TEXT NOT NULL, 
	CONSTRAINT pk_tasks PRIMARY KEY (digest), 
	CONSTRAINT ck_tasks_queries CHECK (next_query >= 0 AND next_query <= max_queries)
);
-- next
CREATE INDEX ix_tasks_created_at_digest ON tasks (created_at, digest);
-- next
CREATE OR REPLACE FUNCTION tasks_stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.digest IS DISTINCT FROM OLD.digest OR NEW.body IS DISTINCT FROM OLD.body OR NEW.participants IS DISTINCT FROM OLD.participants OR NEW.max_queries IS DISTINCT FROM OLD.max_queries OR NEW.created_at IS DISTINCT FROM OLD.created_at OR NEW.created_by IS DISTINCT FROM OLD.created_by THEN RAISE EXCEPTION 'what was written to tasks stays' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER tasks_stay BEFORE UPDATE ON tasks FOR EACH ROW EXECUTE FUNCTION tasks_stay();
-- next
CREATE OR REPLACE FUNCTION tasks_remain() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF TRUE THEN RAISE EXCEPTION 'rows of tasks are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN OLD; END $$;
-- next
CREATE TRIGGER tasks_remain BEFORE DELETE ON tasks FOR EACH ROW EXECUTE FUNCTION tasks_remain();
-- next
CREATE OR REPLACE FUNCTION tasks_remain_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'rows of tasks are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END $$;
-- next
CREATE TRIGGER tasks_remain_all BEFORE TRUNCATE ON tasks FOR EACH STATEMENT EXECUTE FUNCTION tasks_remain_all();
-- next
CREATE OR REPLACE FUNCTION tasks_advance() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.next_query < OLD.next_query THEN RAISE EXCEPTION 'a query of a task is given out once' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER tasks_advance BEFORE UPDATE ON tasks FOR EACH ROW EXECUTE FUNCTION tasks_advance();
-- next
CREATE TABLE returned_queries (
	task_digest TEXT NOT NULL, 
	first_query BIGINT NOT NULL, 
	num_queries BIGINT NOT NULL, 
	CONSTRAINT pk_returned_queries PRIMARY KEY (task_digest, first_query), 
	CONSTRAINT ck_returned_queries_range CHECK (first_query >= 0 AND num_queries >= 1)
);
-- next
CREATE OR REPLACE FUNCTION returned_queries_stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.task_digest IS DISTINCT FROM OLD.task_digest OR NEW.first_query IS DISTINCT FROM OLD.first_query OR NEW.num_queries IS DISTINCT FROM OLD.num_queries THEN RAISE EXCEPTION 'what was written to returned_queries stays' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER returned_queries_stay BEFORE UPDATE ON returned_queries FOR EACH ROW EXECUTE FUNCTION returned_queries_stay();
-- next
CREATE OR REPLACE FUNCTION returned_queries_unasked() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF EXISTS (SELECT 1 FROM rounds JOIN jobs ON jobs.job_id = rounds.job_id WHERE jobs.task_digest = NEW.task_digest AND rounds.first_query < NEW.first_query + NEW.num_queries AND rounds.first_query + rounds.num_queries > NEW.first_query AND (rounds.round_digest IS NOT NULL OR NOT (jobs.state IN ('cancelled', 'completed', 'expired', 'failed', 'refused')))) THEN RAISE EXCEPTION 'only queries that nobody was asked about come back' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER returned_queries_unasked BEFORE INSERT ON returned_queries FOR EACH ROW EXECUTE FUNCTION returned_queries_unasked();
-- next
CREATE OR REPLACE FUNCTION returned_queries_given() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NOT EXISTS (SELECT 1 FROM tasks WHERE tasks.digest = NEW.task_digest AND tasks.next_query >= NEW.first_query + NEW.num_queries) THEN RAISE EXCEPTION 'only queries that were given out come back' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER returned_queries_given BEFORE INSERT ON returned_queries FOR EACH ROW EXECUTE FUNCTION returned_queries_given();
-- next
CREATE OR REPLACE FUNCTION returned_queries_once() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF EXISTS (SELECT 1 FROM returned_queries AS other WHERE other.task_digest = NEW.task_digest AND other.first_query < NEW.first_query + NEW.num_queries AND other.first_query + other.num_queries > NEW.first_query) THEN RAISE EXCEPTION 'a query comes back once' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER returned_queries_once BEFORE INSERT ON returned_queries FOR EACH ROW EXECUTE FUNCTION returned_queries_once();
-- next
CREATE TABLE tokens (
	token_id TEXT NOT NULL, 
	name TEXT NOT NULL, 
	role TEXT NOT NULL, 
	secret_digest TEXT NOT NULL, 
	created_at TEXT NOT NULL, 
	revoked_at TEXT, 
	CONSTRAINT pk_tokens PRIMARY KEY (token_id), 
	CONSTRAINT ck_tokens_role CHECK (role IN ('admin', 'requester', 'viewer')), 
	CONSTRAINT uq_tokens_secret_digest UNIQUE (secret_digest)
);
-- next
CREATE OR REPLACE FUNCTION tokens_stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.token_id IS DISTINCT FROM OLD.token_id OR NEW.name IS DISTINCT FROM OLD.name OR NEW.role IS DISTINCT FROM OLD.role OR NEW.secret_digest IS DISTINCT FROM OLD.secret_digest OR NEW.created_at IS DISTINCT FROM OLD.created_at THEN RAISE EXCEPTION 'what was written to tokens stays' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER tokens_stay BEFORE UPDATE ON tokens FOR EACH ROW EXECUTE FUNCTION tokens_stay();
-- next
CREATE OR REPLACE FUNCTION tokens_remain() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF TRUE THEN RAISE EXCEPTION 'rows of tokens are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN OLD; END $$;
-- next
CREATE TRIGGER tokens_remain BEFORE DELETE ON tokens FOR EACH ROW EXECUTE FUNCTION tokens_remain();
-- next
CREATE OR REPLACE FUNCTION tokens_remain_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'rows of tokens are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END $$;
-- next
CREATE TRIGGER tokens_remain_all BEFORE TRUNCATE ON tokens FOR EACH STATEMENT EXECUTE FUNCTION tokens_remain_all();
-- next
CREATE OR REPLACE FUNCTION tokens_revoked() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF (OLD.revoked_at IS NOT NULL AND NEW.revoked_at IS DISTINCT FROM OLD.revoked_at) THEN RAISE EXCEPTION 'a revoked token stays revoked' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER tokens_revoked BEFORE UPDATE ON tokens FOR EACH ROW EXECUTE FUNCTION tokens_revoked();
-- next
CREATE TABLE parties (
	party_id TEXT NOT NULL, 
	role TEXT NOT NULL, 
	tallier BIGINT, 
	verify_key TEXT NOT NULL, 
	seal_key TEXT NOT NULL, 
	state TEXT NOT NULL, 
	enrolled_at TEXT NOT NULL, 
	last_contact TEXT, 
	facts TEXT NOT NULL, 
	journal_seq BIGINT NOT NULL, 
	journal_hash TEXT NOT NULL, 
	CONSTRAINT pk_parties PRIMARY KEY (party_id), 
	CONSTRAINT ck_parties_role CHECK (role IN ('agent', 'tallier')), 
	CONSTRAINT ck_parties_state CHECK (state IN ('active', 'revoked')), 
	CONSTRAINT ck_parties_tallier CHECK ((role = 'tallier') = (tallier IS NOT NULL)), 
	CONSTRAINT ck_parties_number CHECK (tallier IS NULL OR tallier BETWEEN 0 AND 2), 
	CONSTRAINT uq_parties_verify_key UNIQUE (verify_key), 
	CONSTRAINT uq_parties_seal_key UNIQUE (seal_key)
);
-- next
CREATE UNIQUE INDEX ix_parties_active_tallier ON parties (tallier) WHERE state = 'active';
-- next
CREATE OR REPLACE FUNCTION parties_stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.party_id IS DISTINCT FROM OLD.party_id OR NEW.role IS DISTINCT FROM OLD.role OR NEW.tallier IS DISTINCT FROM OLD.tallier OR NEW.enrolled_at IS DISTINCT FROM OLD.enrolled_at THEN RAISE EXCEPTION 'what was written to parties stays' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER parties_stay BEFORE UPDATE ON parties FOR EACH ROW EXECUTE FUNCTION parties_stay();
-- next
CREATE OR REPLACE FUNCTION parties_remain() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF TRUE THEN RAISE EXCEPTION 'rows of parties are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN OLD; END $$;
-- next
CREATE TRIGGER parties_remain BEFORE DELETE ON parties FOR EACH ROW EXECUTE FUNCTION parties_remain();
-- next
CREATE OR REPLACE FUNCTION parties_remain_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'rows of parties are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END $$;
-- next
CREATE TRIGGER parties_remain_all BEFORE TRUNCATE ON parties FOR EACH STATEMENT EXECUTE FUNCTION parties_remain_all();
-- next
CREATE OR REPLACE FUNCTION parties_witness() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.journal_seq < OLD.journal_seq THEN RAISE EXCEPTION 'the journal of a party never gets shorter' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER parties_witness BEFORE UPDATE ON parties FOR EACH ROW EXECUTE FUNCTION parties_witness();
-- next
CREATE TABLE invitations (
	invitation_id TEXT NOT NULL, 
	party_id TEXT NOT NULL, 
	role TEXT NOT NULL, 
	tallier BIGINT, 
	is_rotation BIGINT NOT NULL, 
	token_digest TEXT NOT NULL, 
	created_by TEXT NOT NULL, 
	created_at TEXT NOT NULL, 
	expires_at TEXT NOT NULL, 
	withdrawn_at TEXT, 
	used_at TEXT, 
	verify_key TEXT, 
	seal_key TEXT, 
	CONSTRAINT pk_invitations PRIMARY KEY (invitation_id), 
	CONSTRAINT ck_invitations_role CHECK (role IN ('agent', 'tallier')), 
	CONSTRAINT ck_invitations_tallier CHECK ((role = 'tallier') = (tallier IS NOT NULL)), 
	CONSTRAINT ck_invitations_rotation CHECK (is_rotation IN (0, 1)), 
	CONSTRAINT ck_invitations_used CHECK ((used_at IS NULL) = (verify_key IS NULL)), 
	CONSTRAINT ck_invitations_used_keys CHECK ((verify_key IS NULL) = (seal_key IS NULL)), 
	CONSTRAINT ck_invitations_one_end CHECK (used_at IS NULL OR withdrawn_at IS NULL), 
	CONSTRAINT uq_invitations_token_digest UNIQUE (token_digest)
);
-- next
CREATE OR REPLACE FUNCTION invitations_stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.invitation_id IS DISTINCT FROM OLD.invitation_id OR NEW.party_id IS DISTINCT FROM OLD.party_id OR NEW.role IS DISTINCT FROM OLD.role OR NEW.tallier IS DISTINCT FROM OLD.tallier OR NEW.is_rotation IS DISTINCT FROM OLD.is_rotation OR NEW.token_digest IS DISTINCT FROM OLD.token_digest OR NEW.created_by IS DISTINCT FROM OLD.created_by OR NEW.created_at IS DISTINCT FROM OLD.created_at OR NEW.expires_at IS DISTINCT FROM OLD.expires_at THEN RAISE EXCEPTION 'what was written to invitations stays' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER invitations_stay BEFORE UPDATE ON invitations FOR EACH ROW EXECUTE FUNCTION invitations_stay();
-- next
CREATE OR REPLACE FUNCTION invitations_remain() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF TRUE THEN RAISE EXCEPTION 'rows of invitations are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN OLD; END $$;
-- next
CREATE TRIGGER invitations_remain BEFORE DELETE ON invitations FOR EACH ROW EXECUTE FUNCTION invitations_remain();
-- next
CREATE OR REPLACE FUNCTION invitations_remain_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'rows of invitations are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END $$;
-- next
CREATE TRIGGER invitations_remain_all BEFORE TRUNCATE ON invitations FOR EACH STATEMENT EXECUTE FUNCTION invitations_remain_all();
-- next
CREATE OR REPLACE FUNCTION invitations_once() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF (OLD.withdrawn_at IS NOT NULL AND NEW.withdrawn_at IS DISTINCT FROM OLD.withdrawn_at) OR (OLD.used_at IS NOT NULL AND NEW.used_at IS DISTINCT FROM OLD.used_at) OR (OLD.verify_key IS NOT NULL AND NEW.verify_key IS DISTINCT FROM OLD.verify_key) OR (OLD.seal_key IS NOT NULL AND NEW.seal_key IS DISTINCT FROM OLD.seal_key) THEN RAISE EXCEPTION 'an invitation is used once and withdrawn once' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER invitations_once BEFORE UPDATE ON invitations FOR EACH ROW EXECUTE FUNCTION invitations_once();
-- next
CREATE TABLE sequences_sent (
	recipient TEXT NOT NULL, 
	reserved BIGINT NOT NULL, 
	CONSTRAINT pk_sequences_sent PRIMARY KEY (recipient), 
	CONSTRAINT ck_sequences_sent_reserved CHECK (reserved >= 0)
);
-- next
CREATE OR REPLACE FUNCTION sequences_sent_remain() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF TRUE THEN RAISE EXCEPTION 'rows of sequences_sent are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN OLD; END $$;
-- next
CREATE TRIGGER sequences_sent_remain BEFORE DELETE ON sequences_sent FOR EACH ROW EXECUTE FUNCTION sequences_sent_remain();
-- next
CREATE OR REPLACE FUNCTION sequences_sent_remain_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'rows of sequences_sent are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END $$;
-- next
CREATE TRIGGER sequences_sent_remain_all BEFORE TRUNCATE ON sequences_sent FOR EACH STATEMENT EXECUTE FUNCTION sequences_sent_remain_all();
-- next
CREATE OR REPLACE FUNCTION sequences_sent_rise() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.reserved <= OLD.reserved THEN RAISE EXCEPTION 'sequence numbers only go up' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER sequences_sent_rise BEFORE UPDATE ON sequences_sent FOR EACH ROW EXECUTE FUNCTION sequences_sent_rise();
-- next
CREATE TABLE sequences_taken (
	sender TEXT NOT NULL, 
	verify_key TEXT NOT NULL, 
	last BIGINT NOT NULL, 
	CONSTRAINT pk_sequences_taken PRIMARY KEY (sender, verify_key), 
	CONSTRAINT ck_sequences_taken_last CHECK (last >= 1)
);
-- next
CREATE OR REPLACE FUNCTION sequences_taken_remain() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF TRUE THEN RAISE EXCEPTION 'rows of sequences_taken are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN OLD; END $$;
-- next
CREATE TRIGGER sequences_taken_remain BEFORE DELETE ON sequences_taken FOR EACH ROW EXECUTE FUNCTION sequences_taken_remain();
-- next
CREATE OR REPLACE FUNCTION sequences_taken_remain_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'rows of sequences_taken are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END $$;
-- next
CREATE TRIGGER sequences_taken_remain_all BEFORE TRUNCATE ON sequences_taken FOR EACH STATEMENT EXECUTE FUNCTION sequences_taken_remain_all();
-- next
CREATE OR REPLACE FUNCTION sequences_taken_rise() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.last <= OLD.last THEN RAISE EXCEPTION 'sequence numbers only go up' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER sequences_taken_rise BEFORE UPDATE ON sequences_taken FOR EACH ROW EXECUTE FUNCTION sequences_taken_rise();
-- next
CREATE TABLE task_approvals (
	digest TEXT NOT NULL, 
	body TEXT NOT NULL, 
	state TEXT NOT NULL, 
	requested_at TEXT NOT NULL, 
	decided_at TEXT, 
	CONSTRAINT pk_task_approvals PRIMARY KEY (digest), 
	CONSTRAINT ck_task_approvals_state CHECK (state IN ('approved', 'revoked', 'waiting')), 
	CONSTRAINT ck_task_approvals_decided CHECK ((state = 'waiting') = (decided_at IS NULL))
);
-- next
CREATE OR REPLACE FUNCTION task_approvals_stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.digest IS DISTINCT FROM OLD.digest OR NEW.body IS DISTINCT FROM OLD.body OR NEW.requested_at IS DISTINCT FROM OLD.requested_at THEN RAISE EXCEPTION 'what was written to task_approvals stays' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER task_approvals_stay BEFORE UPDATE ON task_approvals FOR EACH ROW EXECUTE FUNCTION task_approvals_stay();
-- next
CREATE TABLE proposal_answers (
	digest TEXT NOT NULL, 
	job_id TEXT NOT NULL, 
	task_digest TEXT NOT NULL, 
	answer TEXT NOT NULL, 
	until TEXT NOT NULL, 
	answered_at TEXT NOT NULL, 
	CONSTRAINT pk_proposal_answers PRIMARY KEY (digest), 
	CONSTRAINT ck_proposal_answers_answer CHECK (answer IN ('declined', 'willing'))
);
-- next
CREATE OR REPLACE FUNCTION proposal_answers_stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.digest IS DISTINCT FROM OLD.digest OR NEW.job_id IS DISTINCT FROM OLD.job_id OR NEW.task_digest IS DISTINCT FROM OLD.task_digest OR NEW.answer IS DISTINCT FROM OLD.answer OR NEW.answered_at IS DISTINCT FROM OLD.answered_at THEN RAISE EXCEPTION 'what was written to proposal_answers stays' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER proposal_answers_stay BEFORE UPDATE ON proposal_answers FOR EACH ROW EXECUTE FUNCTION proposal_answers_stay();
-- next
CREATE OR REPLACE FUNCTION proposal_answers_remain() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF TRUE THEN RAISE EXCEPTION 'rows of proposal_answers are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN OLD; END $$;
-- next
CREATE TRIGGER proposal_answers_remain BEFORE DELETE ON proposal_answers FOR EACH ROW EXECUTE FUNCTION proposal_answers_remain();
-- next
CREATE OR REPLACE FUNCTION proposal_answers_remain_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'rows of proposal_answers are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END $$;
-- next
CREATE TRIGGER proposal_answers_remain_all BEFORE TRUNCATE ON proposal_answers FOR EACH STATEMENT EXECUTE FUNCTION proposal_answers_remain_all();
-- next
CREATE TABLE told_amounts (
	digest TEXT NOT NULL, 
	scale TEXT NOT NULL, 
	bound BIGINT NOT NULL, 
	amount BIGINT NOT NULL, 
	requester TEXT NOT NULL, 
	told_at TEXT NOT NULL, 
	for_nothing BIGINT NOT NULL, 
	CONSTRAINT pk_told_amounts PRIMARY KEY (digest, scale, bound, amount), 
	CONSTRAINT ck_told_amounts_for_nothing CHECK (for_nothing IN (0, 1)), 
	CONSTRAINT ck_told_amounts_covered CHECK (for_nothing = 1 OR amount <= bound)
);
-- next
CREATE INDEX ix_told_amounts_scale_bound_amount ON told_amounts (scale, bound, amount);
-- next
CREATE OR REPLACE FUNCTION told_amounts_stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.digest IS DISTINCT FROM OLD.digest OR NEW.scale IS DISTINCT FROM OLD.scale OR NEW.bound IS DISTINCT FROM OLD.bound OR NEW.amount IS DISTINCT FROM OLD.amount OR NEW.requester IS DISTINCT FROM OLD.requester OR NEW.told_at IS DISTINCT FROM OLD.told_at THEN RAISE EXCEPTION 'what was written to told_amounts stays' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER told_amounts_stay BEFORE UPDATE ON told_amounts FOR EACH ROW EXECUTE FUNCTION told_amounts_stay();
-- next
CREATE OR REPLACE FUNCTION told_amounts_remain() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF TRUE THEN RAISE EXCEPTION 'rows of told_amounts are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN OLD; END $$;
-- next
CREATE TRIGGER told_amounts_remain BEFORE DELETE ON told_amounts FOR EACH ROW EXECUTE FUNCTION told_amounts_remain();
-- next
CREATE OR REPLACE FUNCTION told_amounts_remain_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'rows of told_amounts are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END $$;
-- next
CREATE TRIGGER told_amounts_remain_all BEFORE TRUNCATE ON told_amounts FOR EACH STATEMENT EXECUTE FUNCTION told_amounts_remain_all();
-- next
CREATE TABLE asked_by (
	task_digest TEXT NOT NULL, 
	requester TEXT NOT NULL, 
	first_at TEXT NOT NULL, 
	CONSTRAINT pk_asked_by PRIMARY KEY (task_digest, requester)
);
-- next
CREATE OR REPLACE FUNCTION asked_by_stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.task_digest IS DISTINCT FROM OLD.task_digest OR NEW.requester IS DISTINCT FROM OLD.requester OR NEW.first_at IS DISTINCT FROM OLD.first_at THEN RAISE EXCEPTION 'what was written to asked_by stays' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER asked_by_stay BEFORE UPDATE ON asked_by FOR EACH ROW EXECUTE FUNCTION asked_by_stay();
-- next
CREATE OR REPLACE FUNCTION asked_by_remain() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF TRUE THEN RAISE EXCEPTION 'rows of asked_by are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN OLD; END $$;
-- next
CREATE TRIGGER asked_by_remain BEFORE DELETE ON asked_by FOR EACH ROW EXECUTE FUNCTION asked_by_remain();
-- next
CREATE OR REPLACE FUNCTION asked_by_remain_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'rows of asked_by are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END $$;
-- next
CREATE TRIGGER asked_by_remain_all BEFORE TRUNCATE ON asked_by FOR EACH STATEMENT EXECUTE FUNCTION asked_by_remain_all();
-- next
CREATE TABLE answered_tasks (
	digest TEXT NOT NULL, 
	body TEXT NOT NULL, 
	first_at TEXT NOT NULL, 
	CONSTRAINT pk_answered_tasks PRIMARY KEY (digest)
);
-- next
CREATE OR REPLACE FUNCTION answered_tasks_stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.digest IS DISTINCT FROM OLD.digest OR NEW.body IS DISTINCT FROM OLD.body OR NEW.first_at IS DISTINCT FROM OLD.first_at THEN RAISE EXCEPTION 'what was written to answered_tasks stays' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER answered_tasks_stay BEFORE UPDATE ON answered_tasks FOR EACH ROW EXECUTE FUNCTION answered_tasks_stay();
-- next
CREATE OR REPLACE FUNCTION answered_tasks_remain() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF TRUE THEN RAISE EXCEPTION 'rows of answered_tasks are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN OLD; END $$;
-- next
CREATE TRIGGER answered_tasks_remain BEFORE DELETE ON answered_tasks FOR EACH ROW EXECUTE FUNCTION answered_tasks_remain();
-- next
CREATE OR REPLACE FUNCTION answered_tasks_remain_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'rows of answered_tasks are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END $$;
-- next
CREATE TRIGGER answered_tasks_remain_all BEFORE TRUNCATE ON answered_tasks FOR EACH STATEMENT EXECUTE FUNCTION answered_tasks_remain_all();
-- next
CREATE TABLE life_spends (
	digest BYTEA NOT NULL, 
	spent BIGINT NOT NULL, 
	CONSTRAINT pk_life_spends PRIMARY KEY (digest), 
	CONSTRAINT ck_life_spends_spent CHECK (spent >= 0)
);
-- next
CREATE OR REPLACE FUNCTION life_spends_stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.digest IS DISTINCT FROM OLD.digest THEN RAISE EXCEPTION 'what was written to life_spends stays' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER life_spends_stay BEFORE UPDATE ON life_spends FOR EACH ROW EXECUTE FUNCTION life_spends_stay();
-- next
CREATE OR REPLACE FUNCTION life_spends_remain() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF TRUE THEN RAISE EXCEPTION 'rows of life_spends are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN OLD; END $$;
-- next
CREATE TRIGGER life_spends_remain BEFORE DELETE ON life_spends FOR EACH ROW EXECUTE FUNCTION life_spends_remain();
-- next
CREATE OR REPLACE FUNCTION life_spends_remain_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'rows of life_spends are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END $$;
-- next
CREATE TRIGGER life_spends_remain_all BEFORE TRUNCATE ON life_spends FOR EACH STATEMENT EXECUTE FUNCTION life_spends_remain_all();
-- next
CREATE OR REPLACE FUNCTION life_spends_grow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.spent < OLD.spent THEN RAISE EXCEPTION 'what a record has spent only grows' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER life_spends_grow BEFORE UPDATE ON life_spends FOR EACH ROW EXECUTE FUNCTION life_spends_grow();
-- next
CREATE TABLE life_rounds (
	seq BIGINT NOT NULL, 
	round_digest TEXT NOT NULL, 
	site_key TEXT NOT NULL, 
	CONSTRAINT pk_life_rounds PRIMARY KEY (seq), 
	CONSTRAINT uq_life_rounds_round_digest UNIQUE (round_digest)
);
-- next
CREATE OR REPLACE FUNCTION life_rounds_stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.seq IS DISTINCT FROM OLD.seq OR NEW.round_digest IS DISTINCT FROM OLD.round_digest OR NEW.site_key IS DISTINCT FROM OLD.site_key THEN RAISE EXCEPTION 'what was written to life_rounds stays' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER life_rounds_stay BEFORE UPDATE ON life_rounds FOR EACH ROW EXECUTE FUNCTION life_rounds_stay();
-- next
CREATE OR REPLACE FUNCTION life_rounds_remain() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF TRUE THEN RAISE EXCEPTION 'rows of life_rounds are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN OLD; END $$;
-- next
CREATE TRIGGER life_rounds_remain BEFORE DELETE ON life_rounds FOR EACH ROW EXECUTE FUNCTION life_rounds_remain();
-- next
CREATE OR REPLACE FUNCTION life_rounds_remain_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'rows of life_rounds are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END $$;
-- next
CREATE TRIGGER life_rounds_remain_all BEFORE TRUNCATE ON life_rounds FOR EACH STATEMENT EXECUTE FUNCTION life_rounds_remain_all();
-- next
CREATE TABLE life_aside (
	account TEXT NOT NULL, 
	nano BIGINT NOT NULL, 
	CONSTRAINT pk_life_aside PRIMARY KEY (account), 
	CONSTRAINT ck_life_aside_nano CHECK (nano >= 1)
);
-- next
CREATE OR REPLACE FUNCTION life_aside_stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.account IS DISTINCT FROM OLD.account THEN RAISE EXCEPTION 'what was written to life_aside stays' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER life_aside_stay BEFORE UPDATE ON life_aside FOR EACH ROW EXECUTE FUNCTION life_aside_stay();
-- next
CREATE OR REPLACE FUNCTION life_aside_remain() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF TRUE THEN RAISE EXCEPTION 'rows of life_aside are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN OLD; END $$;
-- next
CREATE TRIGGER life_aside_remain BEFORE DELETE ON life_aside FOR EACH ROW EXECUTE FUNCTION life_aside_remain();
-- next
CREATE OR REPLACE FUNCTION life_aside_remain_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'rows of life_aside are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END $$;
-- next
CREATE TRIGGER life_aside_remain_all BEFORE TRUNCATE ON life_aside FOR EACH STATEMENT EXECUTE FUNCTION life_aside_remain_all();
-- next
CREATE OR REPLACE FUNCTION life_aside_grow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.nano < OLD.nano THEN RAISE EXCEPTION 'what was promised is not taken back' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER life_aside_grow BEFORE UPDATE ON life_aside FOR EACH ROW EXECUTE FUNCTION life_aside_grow();
-- next
CREATE TABLE life_closed (
	reason TEXT NOT NULL, 
	CONSTRAINT pk_life_closed PRIMARY KEY (reason)
);
-- next
CREATE OR REPLACE FUNCTION life_closed_stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.reason IS DISTINCT FROM OLD.reason THEN RAISE EXCEPTION 'what was written to life_closed stays' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER life_closed_stay BEFORE UPDATE ON life_closed FOR EACH ROW EXECUTE FUNCTION life_closed_stay();
-- next
CREATE OR REPLACE FUNCTION life_closed_remain() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF TRUE THEN RAISE EXCEPTION 'rows of life_closed are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN OLD; END $$;
-- next
CREATE TRIGGER life_closed_remain BEFORE DELETE ON life_closed FOR EACH ROW EXECUTE FUNCTION life_closed_remain();
-- next
CREATE OR REPLACE FUNCTION life_closed_remain_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'rows of life_closed are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END $$;
-- next
CREATE TRIGGER life_closed_remain_all BEFORE TRUNCATE ON life_closed FOR EACH STATEMENT EXECUTE FUNCTION life_closed_remain_all();
-- next
CREATE TABLE tallier_rounds (
	round_digest TEXT NOT NULL, 
	opened BYTEA NOT NULL, 
	state TEXT NOT NULL, 
	contributors TEXT, 
	aggregate BYTEA, 
	CONSTRAINT pk_tallier_rounds PRIMARY KEY (round_digest), 
	CONSTRAINT ck_tallier_rounds_state CHECK (state IN ('fixed', 'forgotten', 'open')), 
	CONSTRAINT ck_tallier_rounds_open CHECK (state <> 'open' OR (contributors IS NULL AND aggregate IS NULL)), 
	CONSTRAINT ck_tallier_rounds_fixed CHECK (state <> 'fixed' OR (contributors IS NOT NULL AND aggregate IS NOT NULL)), 
	CONSTRAINT ck_tallier_rounds_forgotten CHECK (state <> 'forgotten' OR aggregate IS NULL)
);
-- next
CREATE OR REPLACE FUNCTION tallier_rounds_stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.round_digest IS DISTINCT FROM OLD.round_digest OR NEW.opened IS DISTINCT FROM OLD.opened THEN RAISE EXCEPTION 'what was written to tallier_rounds stays' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER tallier_rounds_stay BEFORE UPDATE ON tallier_rounds FOR EACH ROW EXECUTE FUNCTION tallier_rounds_stay();
-- next
CREATE OR REPLACE FUNCTION tallier_rounds_remain() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF TRUE THEN RAISE EXCEPTION 'rows of tallier_rounds are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN OLD; END $$;
-- next
CREATE TRIGGER tallier_rounds_remain BEFORE DELETE ON tallier_rounds FOR EACH ROW EXECUTE FUNCTION tallier_rounds_remain();
-- next
CREATE OR REPLACE FUNCTION tallier_rounds_remain_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'rows of tallier_rounds are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END $$;
-- next
CREATE TRIGGER tallier_rounds_remain_all BEFORE TRUNCATE ON tallier_rounds FOR EACH STATEMENT EXECUTE FUNCTION tallier_rounds_remain_all();
-- next
CREATE OR REPLACE FUNCTION tallier_rounds_once() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF (OLD.contributors IS NOT NULL AND NEW.contributors IS DISTINCT FROM OLD.contributors) OR (OLD.state <> 'open' AND (NEW.state = 'open' OR NEW.contributors IS DISTINCT FROM OLD.contributors)) OR (OLD.state = 'forgotten' AND NEW.state <> 'forgotten') OR (OLD.aggregate IS NOT NULL AND NEW.aggregate IS NOT NULL AND NEW.aggregate <> OLD.aggregate) THEN RAISE EXCEPTION 'a round is summed once for ever' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER tallier_rounds_once BEFORE UPDATE ON tallier_rounds FOR EACH ROW EXECUTE FUNCTION tallier_rounds_once();
-- next
CREATE TABLE erasable_home (
	check_value TEXT NOT NULL, 
	CONSTRAINT pk_erasable_home PRIMARY KEY (check_value)
);
-- next
CREATE TABLE write_probes (
	probe BIGINT NOT NULL, 
	writes BIGINT NOT NULL, 
	CONSTRAINT pk_write_probes PRIMARY KEY (probe), 
	CONSTRAINT ck_write_probes_one_row CHECK (probe = 0 AND writes >= 1)
);
-- next
CREATE TABLE task_shares (
	task_digest TEXT NOT NULL, 
	token_id TEXT NOT NULL, 
	shared_at TEXT NOT NULL, 
	CONSTRAINT pk_task_shares PRIMARY KEY (task_digest, token_id), 
	CONSTRAINT fk_task_shares_task_digest FOREIGN KEY(task_digest) REFERENCES tasks (digest)
);
-- next
CREATE INDEX ix_task_shares_token_id ON task_shares (token_id);
-- next
CREATE TABLE jobs (
	job_id TEXT NOT NULL, 
	task_digest TEXT NOT NULL, 
	name TEXT NOT NULL, 
	state TEXT NOT NULL, 
	images BIGINT NOT NULL, 
	num_queries BIGINT NOT NULL, 
	first_query BIGINT NOT NULL, 
	strategy TEXT NOT NULL, 
	count BIGINT, 
	seed BIGINT NOT NULL, 
	source TEXT NOT NULL, 
	created_at TEXT NOT NULL, 
	updated_at TEXT NOT NULL, 
	expires_at TEXT NOT NULL, 
	created_by TEXT NOT NULL, 
	problem TEXT, 
	version BIGINT NOT NULL, 
	CONSTRAINT pk_jobs PRIMARY KEY (job_id), 
	CONSTRAINT ck_jobs_state CHECK (state IN ('cancelled', 'collecting', 'completed', 'expired', 'failed', 'queued', 'refused', 'tallying')), 
	CONSTRAINT ck_jobs_source CHECK (source IN ('features', 'images')), 
	CONSTRAINT ck_jobs_counts CHECK (images >= 0 AND num_queries >= 0 AND first_query >= 0 AND version >= 1), 
	CONSTRAINT fk_jobs_task_digest FOREIGN KEY(task_digest) REFERENCES tasks (digest)
);
-- next
CREATE INDEX ix_jobs_created_at_job_id ON jobs (created_at, job_id);
-- next
CREATE INDEX ix_jobs_state ON jobs (state);
-- next
CREATE OR REPLACE FUNCTION jobs_stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.job_id IS DISTINCT FROM OLD.job_id OR NEW.task_digest IS DISTINCT FROM OLD.task_digest OR NEW.num_queries IS DISTINCT FROM OLD.num_queries OR NEW.first_query IS DISTINCT FROM OLD.first_query OR NEW.created_at IS DISTINCT FROM OLD.created_at OR NEW.expires_at IS DISTINCT FROM OLD.expires_at OR NEW.created_by IS DISTINCT FROM OLD.created_by THEN RAISE EXCEPTION 'what was written to jobs stays' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER jobs_stay BEFORE UPDATE ON jobs FOR EACH ROW EXECUTE FUNCTION jobs_stay();
-- next
CREATE OR REPLACE FUNCTION jobs_remain() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF TRUE THEN RAISE EXCEPTION 'rows of jobs are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN OLD; END $$;
-- next
CREATE TRIGGER jobs_remain BEFORE DELETE ON jobs FOR EACH ROW EXECUTE FUNCTION jobs_remain();
-- next
CREATE OR REPLACE FUNCTION jobs_remain_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'rows of jobs are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END $$;
-- next
CREATE TRIGGER jobs_remain_all BEFORE TRUNCATE ON jobs FOR EACH STATEMENT EXECUTE FUNCTION jobs_remain_all();
-- next
CREATE OR REPLACE FUNCTION jobs_end() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF OLD.state IN ('cancelled', 'completed', 'expired', 'failed', 'refused') THEN RAISE EXCEPTION 'a finished job never changes' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER jobs_end BEFORE UPDATE ON jobs FOR EACH ROW EXECUTE FUNCTION jobs_end();
-- next
CREATE TABLE party_keys (
	key TEXT NOT NULL, 
	party_id TEXT NOT NULL, 
	CONSTRAINT pk_party_keys PRIMARY KEY (key), 
	CONSTRAINT fk_party_keys_party_id FOREIGN KEY(party_id) REFERENCES parties (party_id)
);
-- next
CREATE OR REPLACE FUNCTION party_keys_stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.key IS DISTINCT FROM OLD.key OR NEW.party_id IS DISTINCT FROM OLD.party_id THEN RAISE EXCEPTION 'what was written to party_keys stays' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER party_keys_stay BEFORE UPDATE ON party_keys FOR EACH ROW EXECUTE FUNCTION party_keys_stay();
-- next
CREATE OR REPLACE FUNCTION party_keys_remain() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF TRUE THEN RAISE EXCEPTION 'rows of party_keys are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN OLD; END $$;
-- next
CREATE TRIGGER party_keys_remain BEFORE DELETE ON party_keys FOR EACH ROW EXECUTE FUNCTION party_keys_remain();
-- next
CREATE OR REPLACE FUNCTION party_keys_remain_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'rows of party_keys are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END $$;
-- next
CREATE TRIGGER party_keys_remain_all BEFORE TRUNCATE ON party_keys FOR EACH STATEMENT EXECUTE FUNCTION party_keys_remain_all();
-- next
CREATE TABLE party_heads (
	party_id TEXT NOT NULL, 
	seq BIGINT NOT NULL, 
	hash TEXT NOT NULL, 
	CONSTRAINT pk_party_heads PRIMARY KEY (party_id), 
	CONSTRAINT ck_party_heads_seq CHECK (seq >= 1), 
	CONSTRAINT fk_party_heads_party_id FOREIGN KEY(party_id) REFERENCES parties (party_id)
);
-- next
CREATE OR REPLACE FUNCTION party_heads_stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.party_id IS DISTINCT FROM OLD.party_id THEN RAISE EXCEPTION 'what was written to party_heads stays' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER party_heads_stay BEFORE UPDATE ON party_heads FOR EACH ROW EXECUTE FUNCTION party_heads_stay();
-- next
CREATE OR REPLACE FUNCTION party_heads_remain() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF TRUE THEN RAISE EXCEPTION 'rows of party_heads are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN OLD; END $$;
-- next
CREATE TRIGGER party_heads_remain BEFORE DELETE ON party_heads FOR EACH ROW EXECUTE FUNCTION party_heads_remain();
-- next
CREATE OR REPLACE FUNCTION party_heads_remain_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'rows of party_heads are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END $$;
-- next
CREATE TRIGGER party_heads_remain_all BEFORE TRUNCATE ON party_heads FOR EACH STATEMENT EXECUTE FUNCTION party_heads_remain_all();
-- next
CREATE OR REPLACE FUNCTION party_heads_rise() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.seq <= OLD.seq THEN RAISE EXCEPTION 'what a party has answered stays answered' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER party_heads_rise BEFORE UPDATE ON party_heads FOR EACH ROW EXECUTE FUNCTION party_heads_rise();
-- next
CREATE TABLE answered_rounds (
	round_digest TEXT NOT NULL, 
	shard_version TEXT NOT NULL, 
	reservation_id TEXT NOT NULL, 
	ledger_seq BIGINT NOT NULL, 
	num_queries BIGINT NOT NULL, 
	task_digest TEXT NOT NULL, 
	recipients TEXT NOT NULL, 
	CONSTRAINT pk_answered_rounds PRIMARY KEY (round_digest), 
	CONSTRAINT uq_answered_rounds_reservation_id UNIQUE (reservation_id), 
	CONSTRAINT uq_answered_rounds_ledger_seq UNIQUE (ledger_seq), 
	CONSTRAINT ck_answered_rounds_queries CHECK (num_queries >= 1), 
	CONSTRAINT fk_answered_rounds_ledger_seq FOREIGN KEY(ledger_seq) REFERENCES ledger_entries (seq)
);
-- next
CREATE INDEX ix_answered_rounds_task_digest ON answered_rounds (task_digest);
-- next
CREATE OR REPLACE FUNCTION answered_rounds_stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.round_digest IS DISTINCT FROM OLD.round_digest OR NEW.shard_version IS DISTINCT FROM OLD.shard_version OR NEW.reservation_id IS DISTINCT FROM OLD.reservation_id OR NEW.ledger_seq IS DISTINCT FROM OLD.ledger_seq OR NEW.num_queries IS DISTINCT FROM OLD.num_queries OR NEW.task_digest IS DISTINCT FROM OLD.task_digest OR NEW.recipients IS DISTINCT FROM OLD.recipients THEN RAISE EXCEPTION 'what was written to answered_rounds stays' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER answered_rounds_stay BEFORE UPDATE ON answered_rounds FOR EACH ROW EXECUTE FUNCTION answered_rounds_stay();
-- next
CREATE OR REPLACE FUNCTION answered_rounds_remain() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF TRUE THEN RAISE EXCEPTION 'rows of answered_rounds are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN OLD; END $$;
-- next
CREATE TRIGGER answered_rounds_remain BEFORE DELETE ON answered_rounds FOR EACH ROW EXECUTE FUNCTION answered_rounds_remain();
-- next
CREATE OR REPLACE FUNCTION answered_rounds_remain_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'rows of answered_rounds are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END $$;
-- next
CREATE TRIGGER answered_rounds_remain_all BEFORE TRUNCATE ON answered_rounds FOR EACH STATEMENT EXECUTE FUNCTION answered_rounds_remain_all();
-- next
CREATE OR REPLACE FUNCTION answered_rounds_paid() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NOT EXISTS (SELECT 1 FROM ledger_entries WHERE ledger_entries.seq = NEW.ledger_seq AND ledger_entries.kind = 'post' AND ledger_entries.reservation_id = NEW.reservation_id) THEN RAISE EXCEPTION 'an answer is paid for by an entry of the ledger' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER answered_rounds_paid BEFORE INSERT ON answered_rounds FOR EACH ROW EXECUTE FUNCTION answered_rounds_paid();
-- next
CREATE TABLE promised_rounds (
	reservation_id TEXT NOT NULL, 
	digest TEXT NOT NULL, 
	task_digest TEXT NOT NULL, 
	num_queries BIGINT NOT NULL, 
	amounts TEXT NOT NULL, 
	CONSTRAINT pk_promised_rounds PRIMARY KEY (reservation_id), 
	CONSTRAINT ck_promised_rounds_queries CHECK (num_queries >= 1), 
	CONSTRAINT fk_promised_rounds_digest FOREIGN KEY(digest) REFERENCES proposal_answers (digest)
);
-- next
CREATE OR REPLACE FUNCTION promised_rounds_stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.reservation_id IS DISTINCT FROM OLD.reservation_id OR NEW.digest IS DISTINCT FROM OLD.digest OR NEW.task_digest IS DISTINCT FROM OLD.task_digest OR NEW.num_queries IS DISTINCT FROM OLD.num_queries OR NEW.amounts IS DISTINCT FROM OLD.amounts THEN RAISE EXCEPTION 'what was written to promised_rounds stays' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER promised_rounds_stay BEFORE UPDATE ON promised_rounds FOR EACH ROW EXECUTE FUNCTION promised_rounds_stay();
-- next
CREATE OR REPLACE FUNCTION promised_rounds_remain() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF TRUE THEN RAISE EXCEPTION 'rows of promised_rounds are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN OLD; END $$;
-- next
CREATE TRIGGER promised_rounds_remain BEFORE DELETE ON promised_rounds FOR EACH ROW EXECUTE FUNCTION promised_rounds_remain();
-- next
CREATE OR REPLACE FUNCTION promised_rounds_remain_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'rows of promised_rounds are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END $$;
-- next
CREATE TRIGGER promised_rounds_remain_all BEFORE TRUNCATE ON promised_rounds FOR EACH STATEMENT EXECUTE FUNCTION promised_rounds_remain_all();
-- next
CREATE TABLE taken_by (
	reservation_id TEXT NOT NULL, 
	requester TEXT NOT NULL, 
	instance_nano BIGINT NOT NULL, 
	agent_nano BIGINT NOT NULL, 
	life_nano BIGINT NOT NULL, 
	CONSTRAINT pk_taken_by PRIMARY KEY (reservation_id), 
	CONSTRAINT ck_taken_by_amounts CHECK (instance_nano >= 0 AND agent_nano >= 0 AND life_nano >= 0), 
	CONSTRAINT fk_taken_by_reservation_id FOREIGN KEY(reservation_id) REFERENCES ledger_reservations (reservation_id)
);
-- next
CREATE INDEX ix_taken_by_requester ON taken_by (requester);
-- next
CREATE OR REPLACE FUNCTION taken_by_stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.reservation_id IS DISTINCT FROM OLD.reservation_id OR NEW.requester IS DISTINCT FROM OLD.requester OR NEW.instance_nano IS DISTINCT FROM OLD.instance_nano OR NEW.agent_nano IS DISTINCT FROM OLD.agent_nano OR NEW.life_nano IS DISTINCT FROM OLD.life_nano THEN RAISE EXCEPTION 'what was written to taken_by stays' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER taken_by_stay BEFORE UPDATE ON taken_by FOR EACH ROW EXECUTE FUNCTION taken_by_stay();
-- next
CREATE OR REPLACE FUNCTION taken_by_remain() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF TRUE THEN RAISE EXCEPTION 'rows of taken_by are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN OLD; END $$;
-- next
CREATE TRIGGER taken_by_remain BEFORE DELETE ON taken_by FOR EACH ROW EXECUTE FUNCTION taken_by_remain();
-- next
CREATE OR REPLACE FUNCTION taken_by_remain_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'rows of taken_by are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END $$;
-- next
CREATE TRIGGER taken_by_remain_all BEFORE TRUNCATE ON taken_by FOR EACH STATEMENT EXECUTE FUNCTION taken_by_remain_all();
-- next
CREATE TABLE tallier_shares (
	round_digest TEXT NOT NULL, 
	agent_id TEXT NOT NULL, 
	state TEXT NOT NULL, 
	share BYTEA, 
	sharing_id BYTEA, 
	fingerprint BYTEA, 
	CONSTRAINT pk_tallier_shares PRIMARY KEY (round_digest, agent_id), 
	CONSTRAINT ck_tallier_shares_state CHECK (state IN ('dropped', 'excluded', 'held', 'summed')), 
	CONSTRAINT ck_tallier_shares_held CHECK ((state = 'held') = (share IS NOT NULL)), 
	CONSTRAINT ck_tallier_shares_known CHECK (state = 'excluded' OR (sharing_id IS NOT NULL AND fingerprint IS NOT NULL)), 
	CONSTRAINT fk_tallier_shares_round_digest FOREIGN KEY(round_digest) REFERENCES tallier_rounds (round_digest)
);
-- next
CREATE OR REPLACE FUNCTION tallier_shares_stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.round_digest IS DISTINCT FROM OLD.round_digest OR NEW.agent_id IS DISTINCT FROM OLD.agent_id OR NEW.fingerprint IS DISTINCT FROM OLD.fingerprint OR NEW.sharing_id IS DISTINCT FROM OLD.sharing_id THEN RAISE EXCEPTION 'what was written to tallier_shares stays' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER tallier_shares_stay BEFORE UPDATE ON tallier_shares FOR EACH ROW EXECUTE FUNCTION tallier_shares_stay();
-- next
CREATE OR REPLACE FUNCTION tallier_shares_remain() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF TRUE THEN RAISE EXCEPTION 'rows of tallier_shares are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN OLD; END $$;
-- next
CREATE TRIGGER tallier_shares_remain BEFORE DELETE ON tallier_shares FOR EACH ROW EXECUTE FUNCTION tallier_shares_remain();
-- next
CREATE OR REPLACE FUNCTION tallier_shares_remain_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'rows of tallier_shares are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END $$;
-- next
CREATE TRIGGER tallier_shares_remain_all BEFORE TRUNCATE ON tallier_shares FOR EACH STATEMENT EXECUTE FUNCTION tallier_shares_remain_all();
-- next
CREATE OR REPLACE FUNCTION tallier_shares_over() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF OLD.state <> 'held' AND NEW.state <> OLD.state THEN RAISE EXCEPTION 'a share that was summed, excluded or dropped stays so' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER tallier_shares_over BEFORE UPDATE ON tallier_shares FOR EACH ROW EXECUTE FUNCTION tallier_shares_over();
-- next
CREATE OR REPLACE FUNCTION tallier_shares_late() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.state = 'held' AND NOT EXISTS (SELECT 1 FROM tallier_rounds WHERE tallier_rounds.round_digest = NEW.round_digest AND tallier_rounds.state = 'open') THEN RAISE EXCEPTION 'a round that was summed or forgotten takes no share' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER tallier_shares_late BEFORE INSERT ON tallier_shares FOR EACH ROW EXECUTE FUNCTION tallier_shares_late();
-- next
CREATE TABLE idempotency_keys (
	token_id TEXT NOT NULL, 
	key TEXT NOT NULL, 
	body_digest TEXT NOT NULL, 
	job_id TEXT NOT NULL, 
	CONSTRAINT pk_idempotency_keys PRIMARY KEY (token_id, key), 
	CONSTRAINT fk_idempotency_keys_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id)
);
-- next
CREATE OR REPLACE FUNCTION idempotency_keys_stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.token_id IS DISTINCT FROM OLD.token_id OR NEW.key IS DISTINCT FROM OLD.key OR NEW.body_digest IS DISTINCT FROM OLD.body_digest OR NEW.job_id IS DISTINCT FROM OLD.job_id THEN RAISE EXCEPTION 'what was written to idempotency_keys stays' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER idempotency_keys_stay BEFORE UPDATE ON idempotency_keys FOR EACH ROW EXECUTE FUNCTION idempotency_keys_stay();
-- next
CREATE OR REPLACE FUNCTION idempotency_keys_remain() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF TRUE THEN RAISE EXCEPTION 'rows of idempotency_keys are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN OLD; END $$;
-- next
CREATE TRIGGER idempotency_keys_remain BEFORE DELETE ON idempotency_keys FOR EACH ROW EXECUTE FUNCTION idempotency_keys_remain();
-- next
CREATE OR REPLACE FUNCTION idempotency_keys_remain_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'rows of idempotency_keys are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END $$;
-- next
CREATE TRIGGER idempotency_keys_remain_all BEFORE TRUNCATE ON idempotency_keys FOR EACH STATEMENT EXECUTE FUNCTION idempotency_keys_remain_all();
-- next
CREATE TABLE rounds (
	job_id TEXT NOT NULL, 
	number BIGINT NOT NULL, 
	first_query BIGINT NOT NULL, 
	num_queries BIGINT NOT NULL, 
	state TEXT NOT NULL, 
	batch_digest TEXT, 
	round_digest TEXT, 
	contributors TEXT, 
	ledger_seq BIGINT, 
	CONSTRAINT pk_rounds PRIMARY KEY (job_id, number), 
	CONSTRAINT uq_rounds_round_digest UNIQUE (round_digest), 
	CONSTRAINT ck_rounds_counts CHECK (number >= 0 AND first_query >= 0 AND num_queries >= 1), 
	CONSTRAINT ck_rounds_state CHECK (state IN ('agreed', 'asked', 'opened', 'posted', 'waiting')), 
	CONSTRAINT ck_rounds_digests CHECK ((batch_digest IS NULL) = (round_digest IS NULL)), 
	CONSTRAINT ck_rounds_asked CHECK (state = 'waiting' OR round_digest IS NOT NULL), 
	CONSTRAINT ck_rounds_agreed CHECK ((state IN ('agreed', 'posted', 'opened')) = (contributors IS NOT NULL)), 
	CONSTRAINT ck_rounds_posted CHECK ((state IN ('posted', 'opened')) = (ledger_seq IS NOT NULL)), 
	CONSTRAINT fk_rounds_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id)
);
-- next
CREATE OR REPLACE FUNCTION rounds_stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.job_id IS DISTINCT FROM OLD.job_id OR NEW.number IS DISTINCT FROM OLD.number OR NEW.first_query IS DISTINCT FROM OLD.first_query OR NEW.num_queries IS DISTINCT FROM OLD.num_queries THEN RAISE EXCEPTION 'what was written to rounds stays' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER rounds_stay BEFORE UPDATE ON rounds FOR EACH ROW EXECUTE FUNCTION rounds_stay();
-- next
CREATE OR REPLACE FUNCTION rounds_remain() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF TRUE THEN RAISE EXCEPTION 'rows of rounds are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN OLD; END $$;
-- next
CREATE TRIGGER rounds_remain BEFORE DELETE ON rounds FOR EACH ROW EXECUTE FUNCTION rounds_remain();
-- next
CREATE OR REPLACE FUNCTION rounds_remain_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'rows of rounds are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END $$;
-- next
CREATE TRIGGER rounds_remain_all BEFORE TRUNCATE ON rounds FOR EACH STATEMENT EXECUTE FUNCTION rounds_remain_all();
-- next
CREATE OR REPLACE FUNCTION rounds_once() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF (OLD.batch_digest IS NOT NULL AND NEW.batch_digest IS DISTINCT FROM OLD.batch_digest) OR (OLD.round_digest IS NOT NULL AND NEW.round_digest IS DISTINCT FROM OLD.round_digest) OR (OLD.contributors IS NOT NULL AND NEW.contributors IS DISTINCT FROM OLD.contributors) OR (OLD.ledger_seq IS NOT NULL AND NEW.ledger_seq IS DISTINCT FROM OLD.ledger_seq) THEN RAISE EXCEPTION 'what a round was fixed to stays for ever' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER rounds_once BEFORE UPDATE ON rounds FOR EACH ROW EXECUTE FUNCTION rounds_once();
-- next
CREATE OR REPLACE FUNCTION rounds_forward() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF (CASE NEW.state WHEN 'waiting' THEN 0 WHEN 'asked' THEN 1 WHEN 'agreed' THEN 2 WHEN 'posted' THEN 3 WHEN 'opened' THEN 4 END) - (CASE OLD.state WHEN 'waiting' THEN 0 WHEN 'asked' THEN 1 WHEN 'agreed' THEN 2 WHEN 'posted' THEN 3 WHEN 'opened' THEN 4 END) NOT IN (0, 1) THEN RAISE EXCEPTION 'a round takes one step forward at a time' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER rounds_forward BEFORE UPDATE ON rounds FOR EACH ROW EXECUTE FUNCTION rounds_forward();
-- next
CREATE OR REPLACE FUNCTION rounds_opened() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.state = 'opened' AND NOT EXISTS (SELECT 1 FROM releases WHERE releases.job_id = NEW.job_id AND releases.number = NEW.number) THEN RAISE EXCEPTION 'a round is opened by storing its release' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER rounds_opened BEFORE UPDATE ON rounds FOR EACH ROW EXECUTE FUNCTION rounds_opened();
-- next
CREATE OR REPLACE FUNCTION rounds_paid() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.state = 'posted' AND NOT EXISTS (SELECT 1 FROM ledger_entries WHERE ledger_entries.seq = NEW.ledger_seq AND ledger_entries.kind = 'post' AND ledger_entries.reservation_id = NEW.job_id || '/' || NEW.number) THEN RAISE EXCEPTION 'a round is posted by an entry of the ledger that posts its charge' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER rounds_paid BEFORE UPDATE ON rounds FOR EACH ROW EXECUTE FUNCTION rounds_paid();
-- next
CREATE OR REPLACE FUNCTION rounds_live() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF EXISTS (SELECT 1 FROM jobs WHERE jobs.job_id = NEW.job_id AND jobs.state IN ('cancelled', 'completed', 'expired', 'failed', 'refused')) THEN RAISE EXCEPTION 'a round of a finished job never changes' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER rounds_live BEFORE UPDATE ON rounds FOR EACH ROW EXECUTE FUNCTION rounds_live();
-- next
CREATE OR REPLACE FUNCTION rounds_begin() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.state <> 'waiting' THEN RAISE EXCEPTION 'a round begins as waiting' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER rounds_begin BEFORE INSERT ON rounds FOR EACH ROW EXECUTE FUNCTION rounds_begin();
-- next
CREATE TABLE job_answers (
	job_id TEXT NOT NULL, 
	agent_id TEXT NOT NULL, 
	answer TEXT NOT NULL, 
	reason TEXT NOT NULL, 
	sentence TEXT NOT NULL, 
	until TEXT, 
	CONSTRAINT pk_job_answers PRIMARY KEY (job_id, agent_id), 
	CONSTRAINT ck_job_answers_answer CHECK (answer IN ('declined', 'later', 'willing')), 
	CONSTRAINT ck_job_answers_until CHECK ((answer = 'willing') = (until IS NOT NULL)), 
	CONSTRAINT fk_job_answers_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id)
);
-- next
CREATE OR REPLACE FUNCTION job_answers_stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.job_id IS DISTINCT FROM OLD.job_id OR NEW.agent_id IS DISTINCT FROM OLD.agent_id THEN RAISE EXCEPTION 'what was written to job_answers stays' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER job_answers_stay BEFORE UPDATE ON job_answers FOR EACH ROW EXECUTE FUNCTION job_answers_stay();
-- next
CREATE TABLE job_asked (
	job_id TEXT NOT NULL, 
	agents TEXT NOT NULL, 
	CONSTRAINT pk_job_asked PRIMARY KEY (job_id), 
	CONSTRAINT fk_job_asked_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id)
);
-- next
CREATE OR REPLACE FUNCTION job_asked_stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.job_id IS DISTINCT FROM OLD.job_id OR NEW.agents IS DISTINCT FROM OLD.agents THEN RAISE EXCEPTION 'what was written to job_asked stays' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER job_asked_stay BEFORE UPDATE ON job_asked FOR EACH ROW EXECUTE FUNCTION job_asked_stay();
-- next
CREATE OR REPLACE FUNCTION job_asked_remain() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF TRUE THEN RAISE EXCEPTION 'rows of job_asked are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN OLD; END $$;
-- next
CREATE TRIGGER job_asked_remain BEFORE DELETE ON job_asked FOR EACH ROW EXECUTE FUNCTION job_asked_remain();
-- next
CREATE OR REPLACE FUNCTION job_asked_remain_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'rows of job_asked are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END $$;
-- next
CREATE TRIGGER job_asked_remain_all BEFORE TRUNCATE ON job_asked FOR EACH STATEMENT EXECUTE FUNCTION job_asked_remain_all();
-- next
CREATE TABLE forgotten_jobs (
	job_id TEXT NOT NULL, 
	at TEXT NOT NULL, 
	because TEXT NOT NULL, 
	CONSTRAINT pk_forgotten_jobs PRIMARY KEY (job_id), 
	CONSTRAINT ck_forgotten_jobs_because CHECK (because IN ('age', 'asked')), 
	CONSTRAINT fk_forgotten_jobs_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id)
);
-- next
CREATE OR REPLACE FUNCTION forgotten_jobs_stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.job_id IS DISTINCT FROM OLD.job_id OR NEW.at IS DISTINCT FROM OLD.at OR NEW.because IS DISTINCT FROM OLD.because THEN RAISE EXCEPTION 'what was written to forgotten_jobs stays' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER forgotten_jobs_stay BEFORE UPDATE ON forgotten_jobs FOR EACH ROW EXECUTE FUNCTION forgotten_jobs_stay();
-- next
CREATE OR REPLACE FUNCTION forgotten_jobs_remain() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF TRUE THEN RAISE EXCEPTION 'rows of forgotten_jobs are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN OLD; END $$;
-- next
CREATE TRIGGER forgotten_jobs_remain BEFORE DELETE ON forgotten_jobs FOR EACH ROW EXECUTE FUNCTION forgotten_jobs_remain();
-- next
CREATE OR REPLACE FUNCTION forgotten_jobs_remain_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'rows of forgotten_jobs are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END $$;
-- next
CREATE TRIGGER forgotten_jobs_remain_all BEFORE TRUNCATE ON forgotten_jobs FOR EACH STATEMENT EXECUTE FUNCTION forgotten_jobs_remain_all();
-- next
CREATE OR REPLACE FUNCTION forgotten_jobs_ended() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NOT EXISTS (SELECT 1 FROM jobs WHERE jobs.job_id = NEW.job_id AND jobs.state IN ('cancelled', 'completed', 'expired', 'failed', 'refused')) THEN RAISE EXCEPTION 'only a job that has ended is forgotten' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER forgotten_jobs_ended BEFORE INSERT ON forgotten_jobs FOR EACH ROW EXECUTE FUNCTION forgotten_jobs_ended();
-- next
CREATE TABLE agent_rounds (
	round_digest TEXT NOT NULL, 
	state TEXT NOT NULL, 
	kept_until TEXT NOT NULL, 
	answer BYTEA, 
	CONSTRAINT pk_agent_rounds PRIMARY KEY (round_digest), 
	CONSTRAINT ck_agent_rounds_state CHECK (state IN ('charged', 'erased', 'stored')), 
	CONSTRAINT ck_agent_rounds_stored CHECK ((state = 'stored') = (answer IS NOT NULL)), 
	CONSTRAINT fk_agent_rounds_round_digest FOREIGN KEY(round_digest) REFERENCES answered_rounds (round_digest)
);
-- next
CREATE OR REPLACE FUNCTION agent_rounds_stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.round_digest IS DISTINCT FROM OLD.round_digest OR NEW.kept_until IS DISTINCT FROM OLD.kept_until THEN RAISE EXCEPTION 'what was written to agent_rounds stays' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER agent_rounds_stay BEFORE UPDATE ON agent_rounds FOR EACH ROW EXECUTE FUNCTION agent_rounds_stay();
-- next
CREATE OR REPLACE FUNCTION agent_rounds_remain() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF TRUE THEN RAISE EXCEPTION 'rows of agent_rounds are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN OLD; END $$;
-- next
CREATE TRIGGER agent_rounds_remain BEFORE DELETE ON agent_rounds FOR EACH ROW EXECUTE FUNCTION agent_rounds_remain();
-- next
CREATE OR REPLACE FUNCTION agent_rounds_remain_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'rows of agent_rounds are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END $$;
-- next
CREATE TRIGGER agent_rounds_remain_all BEFORE TRUNCATE ON agent_rounds FOR EACH STATEMENT EXECUTE FUNCTION agent_rounds_remain_all();
-- next
CREATE OR REPLACE FUNCTION agent_rounds_once() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF OLD.state = 'erased' OR NEW.state = 'charged' OR (OLD.answer IS NOT NULL AND NEW.answer IS NOT NULL AND NEW.answer IS DISTINCT FROM OLD.answer) THEN RAISE EXCEPTION 'an answer is stored once and erased for ever' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER agent_rounds_once BEFORE UPDATE ON agent_rounds FOR EACH ROW EXECUTE FUNCTION agent_rounds_once();
-- next
CREATE TABLE planned_batches (
	job_id TEXT NOT NULL, 
	number BIGINT NOT NULL, 
	batch_digest TEXT NOT NULL, 
	round_digest TEXT NOT NULL, 
	CONSTRAINT pk_planned_batches PRIMARY KEY (job_id, number), 
	CONSTRAINT fk_planned_batches_job_id_number FOREIGN KEY(job_id, number) REFERENCES rounds (job_id, number)
);
-- next
CREATE INDEX ix_planned_batches_round_digest ON planned_batches (round_digest);
-- next
CREATE OR REPLACE FUNCTION planned_batches_stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.job_id IS DISTINCT FROM OLD.job_id OR NEW.number IS DISTINCT FROM OLD.number OR NEW.batch_digest IS DISTINCT FROM OLD.batch_digest OR NEW.round_digest IS DISTINCT FROM OLD.round_digest THEN RAISE EXCEPTION 'what was written to planned_batches stays' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER planned_batches_stay BEFORE UPDATE ON planned_batches FOR EACH ROW EXECUTE FUNCTION planned_batches_stay();
-- next
CREATE OR REPLACE FUNCTION planned_batches_remain() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF TRUE THEN RAISE EXCEPTION 'rows of planned_batches are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN OLD; END $$;
-- next
CREATE TRIGGER planned_batches_remain BEFORE DELETE ON planned_batches FOR EACH ROW EXECUTE FUNCTION planned_batches_remain();
-- next
CREATE OR REPLACE FUNCTION planned_batches_remain_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'rows of planned_batches are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END $$;
-- next
CREATE TRIGGER planned_batches_remain_all BEFORE TRUNCATE ON planned_batches FOR EACH STATEMENT EXECUTE FUNCTION planned_batches_remain_all();
-- next
CREATE TABLE round_participants (
	job_id TEXT NOT NULL, 
	number BIGINT NOT NULL, 
	verify_keys TEXT NOT NULL, 
	CONSTRAINT pk_round_participants PRIMARY KEY (job_id, number), 
	CONSTRAINT fk_round_participants_job_id_number FOREIGN KEY(job_id, number) REFERENCES rounds (job_id, number)
);
-- next
CREATE OR REPLACE FUNCTION round_participants_stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.job_id IS DISTINCT FROM OLD.job_id OR NEW.number IS DISTINCT FROM OLD.number OR NEW.verify_keys IS DISTINCT FROM OLD.verify_keys THEN RAISE EXCEPTION 'what was written to round_participants stays' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER round_participants_stay BEFORE UPDATE ON round_participants FOR EACH ROW EXECUTE FUNCTION round_participants_stay();
-- next
CREATE OR REPLACE FUNCTION round_participants_remain() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF TRUE THEN RAISE EXCEPTION 'rows of round_participants are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN OLD; END $$;
-- next
CREATE TRIGGER round_participants_remain BEFORE DELETE ON round_participants FOR EACH ROW EXECUTE FUNCTION round_participants_remain();
-- next
CREATE OR REPLACE FUNCTION round_participants_remain_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'rows of round_participants are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END $$;
-- next
CREATE TRIGGER round_participants_remain_all BEFORE TRUNCATE ON round_participants FOR EACH STATEMENT EXECUTE FUNCTION round_participants_remain_all();
-- next
CREATE TABLE round_shares (
	job_id TEXT NOT NULL, 
	number BIGINT NOT NULL, 
	CONSTRAINT pk_round_shares PRIMARY KEY (job_id, number), 
	CONSTRAINT fk_round_shares_job_id_number FOREIGN KEY(job_id, number) REFERENCES rounds (job_id, number)
);
-- next
CREATE OR REPLACE FUNCTION round_shares_stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.job_id IS DISTINCT FROM OLD.job_id OR NEW.number IS DISTINCT FROM OLD.number THEN RAISE EXCEPTION 'what was written to round_shares stays' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER round_shares_stay BEFORE UPDATE ON round_shares FOR EACH ROW EXECUTE FUNCTION round_shares_stay();
-- next
CREATE OR REPLACE FUNCTION round_shares_remain() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF TRUE THEN RAISE EXCEPTION 'rows of round_shares are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN OLD; END $$;
-- next
CREATE TRIGGER round_shares_remain BEFORE DELETE ON round_shares FOR EACH ROW EXECUTE FUNCTION round_shares_remain();
-- next
CREATE OR REPLACE FUNCTION round_shares_remain_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'rows of round_shares are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END $$;
-- next
CREATE TRIGGER round_shares_remain_all BEFORE TRUNCATE ON round_shares FOR EACH STATEMENT EXECUTE FUNCTION round_shares_remain_all();
-- next
CREATE TABLE round_holdings (
	job_id TEXT NOT NULL, 
	number BIGINT NOT NULL, 
	tallier_id TEXT NOT NULL, 
	holdings TEXT NOT NULL, 
	CONSTRAINT pk_round_holdings PRIMARY KEY (job_id, number, tallier_id), 
	CONSTRAINT fk_round_holdings_job_id_number FOREIGN KEY(job_id, number) REFERENCES rounds (job_id, number)
);
-- next
CREATE TABLE round_refusals (
	job_id TEXT NOT NULL, 
	number BIGINT NOT NULL, 
	agent_id TEXT NOT NULL, 
	sentence TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	CONSTRAINT pk_round_refusals PRIMARY KEY (job_id, number, agent_id), 
	CONSTRAINT ck_round_refusals_kind CHECK (kind IN ('final', 'passing')), 
	CONSTRAINT fk_round_refusals_job_id_number FOREIGN KEY(job_id, number) REFERENCES rounds (job_id, number)
);
-- next
CREATE TABLE releases (
	job_id TEXT NOT NULL, 
	number BIGINT NOT NULL, 
	data BYTEA NOT NULL, 
	CONSTRAINT pk_releases PRIMARY KEY (job_id, number), 
	CONSTRAINT fk_releases_job_id_number FOREIGN KEY(job_id, number) REFERENCES rounds (job_id, number)
);
-- next
CREATE OR REPLACE FUNCTION releases_stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.job_id IS DISTINCT FROM OLD.job_id OR NEW.number IS DISTINCT FROM OLD.number OR NEW.data IS DISTINCT FROM OLD.data THEN RAISE EXCEPTION 'what was written to releases stays' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER releases_stay BEFORE UPDATE ON releases FOR EACH ROW EXECUTE FUNCTION releases_stay();
-- next
CREATE OR REPLACE FUNCTION releases_remain() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF TRUE THEN RAISE EXCEPTION 'rows of releases are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN OLD; END $$;
-- next
CREATE TRIGGER releases_remain BEFORE DELETE ON releases FOR EACH ROW EXECUTE FUNCTION releases_remain();
-- next
CREATE OR REPLACE FUNCTION releases_remain_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'rows of releases are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END $$;
-- next
CREATE TRIGGER releases_remain_all BEFORE TRUNCATE ON releases FOR EACH STATEMENT EXECUTE FUNCTION releases_remain_all();
-- next
CREATE OR REPLACE FUNCTION releases_paid() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NOT EXISTS (SELECT 1 FROM rounds WHERE rounds.job_id = NEW.job_id AND rounds.number = NEW.number AND rounds.state = 'posted') THEN RAISE EXCEPTION 'only a round that was paid for is released' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER releases_paid BEFORE INSERT ON releases FOR EACH ROW EXECUTE FUNCTION releases_paid();
-- next
CREATE TABLE aggregate_shares (
	round_digest TEXT NOT NULL, 
	tallier_id TEXT NOT NULL, 
	data BYTEA, 
	data_digest TEXT NOT NULL, 
	CONSTRAINT pk_aggregate_shares PRIMARY KEY (round_digest, tallier_id), 
	CONSTRAINT fk_aggregate_shares_round_digest FOREIGN KEY(round_digest) REFERENCES rounds (round_digest)
);
-- next
CREATE OR REPLACE FUNCTION aggregate_shares_stay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.round_digest IS DISTINCT FROM OLD.round_digest OR NEW.tallier_id IS DISTINCT FROM OLD.tallier_id OR NEW.data_digest IS DISTINCT FROM OLD.data_digest THEN RAISE EXCEPTION 'what was written to aggregate_shares stays' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER aggregate_shares_stay BEFORE UPDATE ON aggregate_shares FOR EACH ROW EXECUTE FUNCTION aggregate_shares_stay();
-- next
CREATE OR REPLACE FUNCTION aggregate_shares_remain() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF TRUE THEN RAISE EXCEPTION 'rows of aggregate_shares are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN OLD; END $$;
-- next
CREATE TRIGGER aggregate_shares_remain BEFORE DELETE ON aggregate_shares FOR EACH ROW EXECUTE FUNCTION aggregate_shares_remain();
-- next
CREATE OR REPLACE FUNCTION aggregate_shares_remain_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'rows of aggregate_shares are kept for ever' USING ERRCODE = 'integrity_constraint_violation'; END $$;
-- next
CREATE TRIGGER aggregate_shares_remain_all BEFORE TRUNCATE ON aggregate_shares FOR EACH STATEMENT EXECUTE FUNCTION aggregate_shares_remain_all();
-- next
CREATE OR REPLACE FUNCTION aggregate_shares_dropped() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.data IS NOT NULL AND NEW.data IS DISTINCT FROM OLD.data THEN RAISE EXCEPTION 'a sum is kept or dropped, never replaced' USING ERRCODE = 'integrity_constraint_violation'; END IF; RETURN NEW; END $$;
-- next
CREATE TRIGGER aggregate_shares_dropped BEFORE UPDATE ON aggregate_shares FOR EACH ROW EXECUTE FUNCTION aggregate_shares_dropped()
