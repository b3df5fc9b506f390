CREATE TABLE journal_owner (
	name TEXT NOT NULL, 
	CONSTRAINT pk_journal_owner PRIMARY KEY (name)
)
 STRICT;
-- next
CREATE TABLE ledger_entries (
	seq INTEGER NOT NULL, 
	at TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	account TEXT NOT NULL, 
	level TEXT NOT NULL, 
	reservation_id TEXT NOT NULL, 
	amount INTEGER NOT NULL, 
	detail TEXT NOT NULL, 
	previous_hash TEXT NOT NULL, 
	hash TEXT NOT NULL, 
	CONSTRAINT pk_ledger_entries PRIMARY KEY (seq), 
	CONSTRAINT ck_ledger_entries_seq CHECK (seq >= 1), 
	CONSTRAINT ck_ledger_entries_kind CHECK (kind IN ('answer', 'cap', 'open', 'post', 'reserve', 'void')), 
	CONSTRAINT ck_ledger_entries_level CHECK (level IN ('agent', 'instance')), 
	CONSTRAINT ck_ledger_entries_amount CHECK (amount >= 0)
)
 STRICT;
-- next
CREATE INDEX ix_ledger_entries_account_level_seq ON ledger_entries (account, level, seq);
-- next
CREATE TRIGGER ledger_entries_stay BEFORE UPDATE ON ledger_entries WHEN 1 BEGIN SELECT RAISE(ABORT, 'ledger entries are append-only'); END;
-- next
CREATE TRIGGER ledger_entries_remain BEFORE DELETE ON ledger_entries WHEN 1 BEGIN SELECT RAISE(ABORT, 'ledger entries are append-only'); END;
-- next
CREATE TRIGGER ledger_entries_follow BEFORE INSERT ON ledger_entries WHEN NEW.seq <> (SELECT coalesce(max(seq), 0) + 1 FROM ledger_entries) BEGIN SELECT RAISE(ABORT, 'ledger entries have no gaps'); END;
-- next
CREATE TABLE ledger_accounts (
	account TEXT NOT NULL, 
	level TEXT NOT NULL, 
	cap INTEGER, 
	spent INTEGER NOT NULL, 
	posted INTEGER NOT NULL, 
	CONSTRAINT pk_ledger_accounts PRIMARY KEY (account, level), 
	CONSTRAINT ck_ledger_accounts_level CHECK (level IN ('agent', 'instance')), 
	CONSTRAINT ck_ledger_accounts_cap CHECK (cap IS NULL OR cap >= 0), 
	CONSTRAINT ck_ledger_accounts_never_overspent CHECK (spent >= 0 AND (cap IS NULL OR spent <= cap)), 
	CONSTRAINT ck_ledger_accounts_posted CHECK (posted >= 0 AND posted <= spent)
)
 WITHOUT ROWID,
 STRICT;
-- next
CREATE TABLE ledger_reservations (
	reservation_id TEXT NOT NULL, 
	state TEXT NOT NULL, 
	first_seq INTEGER NOT NULL, 
	charges INTEGER NOT NULL, 
	settled_seq INTEGER, 
	CONSTRAINT pk_ledger_reservations PRIMARY KEY (reservation_id), 
	CONSTRAINT ck_ledger_reservations_state CHECK (state IN ('reserved', 'posted', 'void')), 
	CONSTRAINT ck_ledger_reservations_settled CHECK ((state = 'reserved') = (settled_seq IS NULL))
)
 WITHOUT ROWID,
 STRICT;
-- next
CREATE INDEX ix_ledger_reservations_reserved ON ledger_reservations (reservation_id) WHERE state = 'reserved';
-- next
CREATE TABLE tasks (
	digest TEXT NOT NULL, 
	body TEXT NOT NULL, 
	participants TEXT NOT NULL, 
	max_queries INTEGER NOT NULL, 
	next_query INTEGER NOT NULL, 
	created_at TEXT NOT NULL, 
	created_by TEXT NOT NULL, 
	CONSTRAINT pk_tasks PRIMARY KEY (digest), 
	CONSTRAINT ck_tasks_queries CHECK (next_query >= 0 AND next_query <= max_queries)
)
 STRICT;
-- next
CREATE INDEX ix_tasks_created_at_digest ON tasks (created_at, digest);
-- next
CREATE TRIGGER tasks_stay BEFORE UPDATE ON tasks WHEN NEW.digest IS NOT OLD.digest OR NEW.body IS NOT OLD.body OR NEW.participants IS NOT OLD.participants OR NEW.max_queries IS NOT OLD.max_queries OR NEW.created_at IS NOT OLD.created_at OR NEW.created_by IS NOT OLD.created_by BEGIN SELECT RAISE(ABORT, 'what was written to tasks stays'); END;
-- next
CREATE TRIGGER tasks_remain BEFORE DELETE ON tasks WHEN 1 BEGIN SELECT RAISE(ABORT, 'rows of tasks are kept for ever'); END;
-- next
CREATE TRIGGER tasks_advance BEFORE UPDATE ON tasks WHEN NEW.next_query < OLD.next_query BEGIN SELECT RAISE(ABORT, 'a query of a task is given out once'); END;
-- next
CREATE TABLE returned_queries (
	task_digest TEXT NOT NULL, 
	first_query INTEGER NOT NULL, 
	num_queries INTEGER NOT NULL, 
	CONSTRAINT pk_returned_queries PRIMARY KEY (task_digest, first_query), 
	CONSTRAINT ck_returned_queries_range CHECK (first_query >= 0 AND num_queries >= 1)
)
 STRICT;
-- next
CREATE TRIGGER returned_queries_stay BEFORE UPDATE ON returned_queries WHEN NEW.task_digest IS NOT OLD.task_digest OR NEW.first_query IS NOT OLD.first_query OR NEW.num_queries IS NOT OLD.num_queries BEGIN SELECT RAISE(ABORT, 'what was written to returned_queries stays'); END;
-- next
CREATE TRIGGER returned_queries_unasked BEFORE INSERT ON returned_queries WHEN EXISTS (SELECT 1 FROM rounds JOIN jobs ON jobs.job_id = rounds.job_id WHERE jobs.task_digest = NEW.task_digest AND rounds.first_query < NEW.first_query + NEW.num_queries AND rounds.first_query + rounds.num_queries > NEW.first_query AND (rounds.round_digest IS NOT NULL OR NOT (jobs.state IN ('cancelled', 'completed', 'expired', 'failed', 'refused')))) BEGIN SELECT RAISE(ABORT, 'only queries that nobody was asked about come back'); END;
-- next
CREATE TRIGGER returned_queries_given BEFORE INSERT ON returned_queries WHEN NOT EXISTS (SELECT 1 FROM tasks WHERE tasks.digest = NEW.task_digest AND tasks.next_query >= NEW.first_query + NEW.num_queries) BEGIN SELECT RAISE(ABORT, 'only queries that were given out come back'); END;
-- next
CREATE TRIGGER returned_queries_once BEFORE INSERT ON returned_queries WHEN EXISTS (SELECT 1 FROM returned_queries AS other WHERE other.task_digest = NEW.task_digest AND other.first_query < NEW.first_query + NEW.num_queries AND other.first_query + other.num_queries > NEW.first_query) BEGIN SELECT RAISE(ABORT, 'a query comes back once'); END;
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
)
 STRICT;
-- next
CREATE TRIGGER tokens_stay BEFORE UPDATE ON tokens WHEN NEW.token_id IS NOT OLD.token_id OR NEW.name IS NOT OLD.name OR NEW.role IS NOT OLD.role OR NEW.secret_digest IS NOT OLD.secret_digest OR NEW.created_at IS NOT OLD.created_at BEGIN SELECT RAISE(ABORT, 'what was written to tokens stays'); END;
-- next
CREATE TRIGGER tokens_remain BEFORE DELETE ON tokens WHEN 1 BEGIN SELECT RAISE(ABORT, 'rows of tokens are kept for ever'); END;
-- next
CREATE TRIGGER tokens_revoked BEFORE UPDATE ON tokens WHEN (OLD.revoked_at IS NOT NULL AND NEW.revoked_at IS NOT OLD.revoked_at) BEGIN SELECT RAISE(ABORT, 'a revoked token stays revoked'); END;
-- next
CREATE TABLE parties (
	party_id TEXT NOT NULL, 
	role TEXT NOT NULL, 
	tallier INTEGER, 
	verify_key TEXT NOT NULL, 
	seal_key TEXT NOT NULL, 
	state TEXT NOT NULL, 
	enrolled_at TEXT NOT NULL, 
	last_contact TEXT, 
	facts TEXT NOT NULL, 
	journal_seq INTEGER NOT NULL, 
	journal_hash TEXT NOT NULL, 
	CONSTRAINT pk_parties PRIMARY KEY (party_id), 
	CONSTRAINT ck_parties_role CHECK (role IN ('agent', 'tallier')), 
	CONSTRAINT ck_parties_state CHECK (state IN ('active', 'revoked')), 
	CONSTRAINT ck_parties_tallier CHECK ((role = 'tallier') = (tallier IS NOT NULL)), 
	CONSTRAINT ck_parties_number CHECK (tallier IS NULL OR tallier BETWEEN 0 AND 2), 
	CONSTRAINT uq_parties_verify_key UNIQUE (verify_key), 
	CONSTRAINT uq_parties_seal_key UNIQUE (seal_key)
)
 STRICT;
-- next
CREATE UNIQUE INDEX ix_parties_active_tallier ON parties (tallier) WHERE state = 'active';
-- next
CREATE TRIGGER parties_stay BEFORE UPDATE ON parties WHEN NEW.party_id IS NOT OLD.party_id OR NEW.role IS NOT OLD.role OR NEW.tallier IS NOT OLD.tallier OR NEW.enrolled_at IS NOT OLD.enrolled_at BEGIN SELECT RAISE(ABORT, 'what was written to parties stays'); END;
-- next
CREATE TRIGGER parties_remain BEFORE DELETE ON parties WHEN 1 BEGIN SELECT RAISE(ABORT, 'rows of parties are kept for ever'); END;
-- next
CREATE TRIGGER parties_witness BEFORE UPDATE ON parties WHEN NEW.journal_seq < OLD.journal_seq BEGIN SELECT RAISE(ABORT, 'the journal of a party never gets shorter'); END;
-- next
CREATE TABLE invitations (
	invitation_id TEXT NOT NULL, 
	party_id TEXT NOT NULL, 
	role TEXT NOT NULL, 
	tallier INTEGER, 
	is_rotation INTEGER NOT NULL, 
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
)
 STRICT;
-- next
CREATE TRIGGER invitations_stay BEFORE UPDATE ON invitations WHEN NEW.invitation_id IS NOT OLD.invitation_id OR NEW.party_id IS NOT OLD.party_id OR NEW.role IS NOT OLD.role OR NEW.tallier IS NOT OLD.tallier OR NEW.is_rotation IS NOT OLD.is_rotation OR NEW.token_digest IS NOT OLD.token_digest OR NEW.created_by IS NOT OLD.created_by OR NEW.created_at IS NOT OLD.created_at OR NEW.expires_at IS NOT OLD.expires_at BEGIN SELECT RAISE(ABORT, 'what was written to invitations stays'); END;
-- next
CREATE TRIGGER invitations_remain BEFORE DELETE ON invitations WHEN 1 BEGIN SELECT RAISE(ABORT, 'rows of invitations are kept for ever'); END;
-- next
CREATE TRIGGER invitations_once BEFORE UPDATE ON invitations WHEN (OLD.withdrawn_at IS NOT NULL AND NEW.withdrawn_at IS NOT OLD.withdrawn_at) OR (OLD.used_at IS NOT NULL AND NEW.used_at IS NOT OLD.used_at) OR (OLD.verify_key IS NOT NULL AND NEW.verify_key IS NOT OLD.verify_key) OR (OLD.seal_key IS NOT NULL AND NEW.seal_key IS NOT OLD.seal_key) BEGIN SELECT RAISE(ABORT, 'an invitation is used once and withdrawn once'); END;
-- next
CREATE TABLE sequences_sent (
	recipient TEXT NOT NULL, 
	reserved INTEGER NOT NULL, 
	CONSTRAINT pk_sequences_sent PRIMARY KEY (recipient), 
	CONSTRAINT ck_sequences_sent_reserved CHECK (reserved >= 0)
)
 STRICT;
-- next
CREATE TRIGGER sequences_sent_remain BEFORE DELETE ON sequences_sent WHEN 1 BEGIN SELECT RAISE(ABORT, 'rows of sequences_sent are kept for ever'); END;
-- next
CREATE TRIGGER sequences_sent_rise BEFORE UPDATE ON sequences_sent WHEN NEW.reserved <= OLD.reserved BEGIN SELECT RAISE(ABORT, 'sequence numbers only go up'); END;
-- next
CREATE TABLE sequences_taken (
	sender TEXT NOT NULL, 
	verify_key TEXT NOT NULL, 
	last INTEGER NOT NULL, 
	CONSTRAINT pk_sequences_taken PRIMARY KEY (sender, verify_key), 
	CONSTRAINT ck_sequences_taken_last CHECK (last >= 1)
)
 STRICT;
-- next
CREATE TRIGGER sequences_taken_remain BEFORE DELETE ON sequences_taken WHEN 1 BEGIN SELECT RAISE(ABORT, 'rows of sequences_taken are kept for ever'); END;
-- next
CREATE TRIGGER sequences_taken_rise BEFORE UPDATE ON sequences_taken WHEN NEW.last <= OLD.last BEGIN SELECT RAISE(ABORT, 'sequence numbers only go up'); END;
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
)
 STRICT;
-- next
CREATE TRIGGER task_approvals_stay BEFORE UPDATE ON task_approvals WHEN NEW.digest IS NOT OLD.digest OR NEW.body IS NOT OLD.body OR NEW.requested_at IS NOT OLD.requested_at BEGIN SELECT RAISE(ABORT, 'what was written to task_approvals stays'); END;
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
)
 STRICT;
-- next
CREATE TRIGGER proposal_answers_stay BEFORE UPDATE ON proposal_answers WHEN NEW.digest IS NOT OLD.digest OR NEW.job_id IS NOT OLD.job_id OR NEW.task_digest IS NOT OLD.task_digest OR NEW.answer IS NOT OLD.answer OR NEW.answered_at IS NOT OLD.answered_at BEGIN SELECT RAISE(ABORT, 'what was written to proposal_answers stays'); END;
-- next
CREATE TRIGGER proposal_answers_remain BEFORE DELETE ON proposal_answers WHEN 1 BEGIN SELECT RAISE(ABORT, 'rows of proposal_answers are kept for ever'); END;
-- next
CREATE TABLE told_amounts (
	digest TEXT NOT NULL, 
	scale TEXT NOT NULL, 
	bound INTEGER NOT NULL, 
	amount INTEGER NOT NULL, 
	requester TEXT NOT NULL, 
	told_at TEXT NOT NULL, 
	for_nothing INTEGER NOT NULL, 
	CONSTRAINT pk_told_amounts PRIMARY KEY (digest, scale, bound, amount), 
	CONSTRAINT ck_told_amounts_for_nothing CHECK (for_nothing IN (0, 1)), 
	CONSTRAINT ck_told_amounts_covered CHECK (for_nothing = 1 OR amount <= bound)
)
 STRICT;
-- next
CREATE INDEX ix_told_amounts_scale_bound_amount ON told_amounts (scale, bound, amount);
-- next
CREATE TRIGGER told_amounts_stay BEFORE UPDATE ON told_amounts WHEN NEW.digest IS NOT OLD.digest OR NEW.scale IS NOT OLD.scale OR NEW.bound IS NOT OLD.bound OR NEW.amount IS NOT OLD.amount OR NEW.requester IS NOT OLD.requester OR NEW.told_at IS NOT OLD.told_at BEGIN SELECT RAISE(ABORT, 'what was written to told_amounts stays'); END;
-- next
CREATE TRIGGER told_amounts_remain BEFORE DELETE ON told_amounts WHEN 1 BEGIN SELECT RAISE(ABORT, 'rows of told_amounts are kept for ever'); END;
-- next
CREATE TABLE asked_by (
	task_digest TEXT NOT NULL, 
	requester TEXT NOT NULL, 
	first_at TEXT NOT NULL, 
	CONSTRAINT pk_asked_by PRIMARY KEY (task_digest, requester)
)
 STRICT;
-- next
CREATE TRIGGER asked_by_stay BEFORE UPDATE ON asked_by WHEN NEW.task_digest IS NOT OLD.task_digest OR NEW.requester IS NOT OLD.requester OR NEW.first_at IS NOT OLD.first_at BEGIN SELECT RAISE(ABORT, 'what was written to asked_by stays'); END;
-- next
CREATE TRIGGER asked_by_remain BEFORE DELETE ON asked_by WHEN 1 BEGIN SELECT RAISE(ABORT, 'rows of asked_by are kept for ever'); END;
-- next
CREATE TABLE answered_tasks (
	digest TEXT NOT NULL, 
	body TEXT NOT NULL, 
	first_at TEXT NOT NULL, 
	CONSTRAINT pk_answered_tasks PRIMARY KEY (digest)
)
 STRICT;
-- next
CREATE TRIGGER answered_tasks_stay BEFORE UPDATE ON answered_tasks WHEN NEW.digest IS NOT OLD.digest OR NEW.body IS NOT OLD.body OR NEW.first_at IS NOT OLD.first_at BEGIN SELECT RAISE(ABORT, 'what was written to answered_tasks stays'); END;
-- next
CREATE TRIGGER answered_tasks_remain BEFORE DELETE ON answered_tasks WHEN 1 BEGIN SELECT RAISE(ABORT, 'rows of answered_tasks are kept for ever'); END;
-- next
CREATE TABLE life_spends (
	digest BLOB NOT NULL, 
	spent INTEGER NOT NULL, 
	CONSTRAINT pk_life_spends PRIMARY KEY (digest), 
	CONSTRAINT ck_life_spends_spent CHECK (spent >= 0)
)
 STRICT;
-- next
CREATE TRIGGER life_spends_stay BEFORE UPDATE ON life_spends WHEN NEW.digest IS NOT OLD.digest BEGIN SELECT RAISE(ABORT, 'what was written to life_spends stays'); END;
-- next
CREATE TRIGGER life_spends_remain BEFORE DELETE ON life_spends WHEN 1 BEGIN SELECT RAISE(ABORT, 'rows of life_spends are kept for ever'); END;
-- next
CREATE TRIGGER life_spends_grow BEFORE UPDATE ON life_spends WHEN NEW.spent < OLD.spent BEGIN SELECT RAISE(ABORT, 'what a record has spent only grows'); END;
-- next
CREATE TABLE life_rounds (
	seq INTEGER NOT NULL, 
	round_digest TEXT NOT NULL, 
	site_key TEXT NOT NULL, 
	CONSTRAINT pk_life_rounds PRIMARY KEY (seq), 
	CONSTRAINT uq_life_rounds_round_digest UNIQUE (round_digest)
)
 STRICT;
-- next
CREATE TRIGGER life_rounds_stay BEFORE UPDATE ON life_rounds WHEN NEW.seq IS NOT OLD.seq OR NEW.round_digest IS NOT OLD.round_digest OR NEW.site_key IS NOT OLD.site_key BEGIN SELECT RAISE(ABORT, 'what was written to life_rounds stays'); END;
-- next
CREATE TRIGGER life_rounds_remain BEFORE DELETE ON life_rounds WHEN 1 BEGIN SELECT RAISE(ABORT, 'rows of life_rounds are kept for ever'); END;
-- next
CREATE TABLE life_aside (
	account TEXT NOT NULL, 
	nano INTEGER NOT NULL, 
	CONSTRAINT pk_life_aside PRIMARY KEY (account), 
	CONSTRAINT ck_life_aside_nano CHECK (nano >= 1)
)
 STRICT;
-- next
CREATE TRIGGER life_aside_stay BEFORE UPDATE ON life_aside WHEN NEW.account IS NOT OLD.account BEGIN SELECT RAISE(ABORT, 'what was written to life_aside stays'); END;
-- next
CREATE TRIGGER life_aside_remain BEFORE DELETE ON life_aside WHEN 1 BEGIN SELECT RAISE(ABORT, 'rows of life_aside are kept for ever'); END;
-- next
CREATE TRIGGER life_aside_grow BEFORE UPDATE ON life_aside WHEN NEW.nano < OLD.nano BEGIN SELECT RAISE(ABORT, 'what was promised is not taken back'); END;
-- next
CREATE TABLE life_closed (
	reason TEXT NOT NULL, 
	CONSTRAINT pk_life_closed PRIMARY KEY (reason)
)
 STRICT;
-- next
CREATE TRIGGER life_closed_stay BEFORE UPDATE ON life_closed WHEN NEW.reason IS NOT OLD.reason BEGIN SELECT RAISE(ABORT, 'what was written to life_closed stays'); END;
-- next
CREATE TRIGGER life_closed_remain BEFORE DELETE ON life_closed WHEN 1 BEGIN SELECT RAISE(ABORT, 'rows of life_closed are kept for ever'); END;
-- next
CREATE TABLE tallier_rounds (
	round_digest TEXT NOT NULL, 
	opened BLOB NOT NULL, 
	state TEXT NOT NULL, 
	contributors TEXT, 
	aggregate BLOB, 
	CONSTRAINT pk_tallier_rounds PRIMARY KEY (round_digest), 
	CONSTRAINT ck_tallier_rounds_state CHECK (state IN ('fixed', 'forgotten', 'open')), 
	CONSTRAINT ck_tallier_rounds_open CHECK (state <> 'open' OR (contributors IS NULL AND aggregate IS NULL)), 
	CONSTRAINT ck_tallier_rounds_fixed CHECK (state <> 'fixed' OR (contributors IS NOT NULL AND aggregate IS NOT NULL)), 
	CONSTRAINT ck_tallier_rounds_forgotten CHECK (state <> 'forgotten' OR aggregate IS NULL)
)
 STRICT;
-- next
CREATE TRIGGER tallier_rounds_stay BEFORE UPDATE ON tallier_rounds WHEN NEW.round_digest IS NOT OLD.round_digest OR NEW.opened IS NOT OLD.opened BEGIN SELECT RAISE(ABORT, 'what was written to tallier_rounds stays'); END;
-- next
CREATE TRIGGER tallier_rounds_remain BEFORE DELETE ON tallier_rounds WHEN 1 BEGIN SELECT RAISE(ABORT, 'rows of tallier_rounds are kept for ever'); END;
-- next
CREATE TRIGGER tallier_rounds_once BEFORE UPDATE ON tallier_rounds WHEN (OLD.contributors IS NOT NULL AND NEW.contributors IS NOT OLD.contributors) OR (OLD.state <> 'open' AND (NEW.state = 'open' OR NEW.contributors IS NOT OLD.contributors)) OR (OLD.state = 'forgotten' AND NEW.state <> 'forgotten') OR (OLD.aggregate IS NOT NULL AND NEW.aggregate IS NOT NULL AND NEW.aggregate <> OLD.aggregate) BEGIN SELECT RAISE(ABORT, 'a round is summed once for ever'); END;
-- next
CREATE TABLE erasable_home (
	check_value TEXT NOT NULL, 
	CONSTRAINT pk_erasable_home PRIMARY KEY (check_value)
)
 STRICT;
-- next
CREATE TABLE write_probes (
	probe INTEGER NOT NULL, 
	writes INTEGER NOT NULL, 
	CONSTRAINT pk_write_probes PRIMARY KEY (probe), 
	CONSTRAINT ck_write_probes_one_row CHECK (probe = 0 AND writes >= 1)
)
 STRICT;
-- next
CREATE TABLE task_shares (
	task_digest TEXT NOT NULL, 
	token_id TEXT NOT NULL, 
	shared_at TEXT NOT NULL, 
	CONSTRAINT pk_task_shares PRIMARY KEY (task_digest, token_id), 
	CONSTRAINT fk_task_shares_task_digest FOREIGN KEY(task_digest) REFERENCES tasks (digest)
)
 STRICT;
-- next
CREATE INDEX ix_task_shares_token_id ON task_shares (token_id);
-- next
CREATE TABLE jobs (
	job_id TEXT NOT NULL, 
	task_digest TEXT NOT NULL, 
	name TEXT NOT NULL, 
	state TEXT NOT NULL, 
	images INTEGER NOT NULL, 
	num_queries INTEGER NOT NULL, 
	first_query INTEGER NOT NULL, 
	strategy TEXT NOT NULL, 
	count INTEGER, 
	seed INTEGER NOT NULL, 
	source TEXT NOT NULL, 
	created_at TEXT NOT NULL, 
	updated_at TEXT NOT NULL, 
	expires_at TEXT NOT NULL, 
	created_by TEXT NOT NULL, 
	problem TEXT, 
	version INTEGER NOT NULL, 
	CONSTRAINT pk_jobs PRIMARY KEY (job_id), 
	CONSTRAINT ck_jobs_state CHECK (state IN ('cancelled', 'collecting', 'completed', 'expired', 'failed', 'queued', 'refused', 'tallying')), 
	CONSTRAINT ck_jobs_source CHECK (source IN ('features', 'images')), 
	CONSTRAINT ck_jobs_counts CHECK (images >= 0 AND num_queries >= 0 AND first_query >= 0 AND version >= 1), 
	CONSTRAINT fk_jobs_task_digest FOREIGN KEY(task_digest) REFERENCES tasks (digest)
)
 STRICT;
-- next
CREATE INDEX ix_jobs_created_at_job_id ON jobs (created_at, job_id);
-- next
CREATE INDEX ix_jobs_state ON jobs (state);
-- next
CREATE TRIGGER jobs_stay BEFORE UPDATE ON jobs WHEN NEW.job_id IS NOT OLD.job_id OR NEW.task_digest IS NOT OLD.task_digest OR NEW.num_queries IS NOT OLD.num_queries OR NEW.first_query IS NOT OLD.first_query OR NEW.created_at IS NOT OLD.created_at OR NEW.expires_at IS NOT OLD.expires_at OR NEW.created_by IS NOT OLD.created_by BEGIN SELECT RAISE(ABORT, 'what was written to jobs stays'); END;
-- next
CREATE TRIGGER jobs_remain BEFORE DELETE ON jobs WHEN 1 BEGIN SELECT RAISE(ABORT, 'rows of jobs are kept for ever'); END;
-- next
CREATE TRIGGER jobs_end BEFORE UPDATE ON jobs WHEN OLD.state IN ('cancelled', 'completed', 'expired', 'failed', 'refused') BEGIN SELECT RAISE(ABORT, 'a finished job never changes'); END;
-- next
CREATE TABLE party_keys (
	"key" TEXT NOT NULL, 
	party_id TEXT NOT NULL, 
	CONSTRAINT pk_party_keys PRIMARY KEY ("key"), 
	CONSTRAINT fk_party_keys_party_id FOREIGN KEY(party_id) REFERENCES parties (party_id)
)
 STRICT;
-- next
CREATE TRIGGER party_keys_stay BEFORE UPDATE ON party_keys WHEN NEW.key IS NOT OLD.key OR NEW.party_id IS NOT OLD.party_id BEGIN SELECT RAISE(ABORT, 'what was written to party_keys stays'); END;
-- next
CREATE TRIGGER party_keys_remain BEFORE DELETE ON party_keys WHEN 1 BEGIN SELECT RAISE(ABORT, 'rows of party_keys are kept for ever'); END;
-- next
CREATE TABLE party_heads (
	party_id TEXT NOT NULL, 
	seq INTEGER NOT NULL, 
	hash TEXT NOT NULL, 
	CONSTRAINT pk_party_heads PRIMARY KEY (party_id), 
	CONSTRAINT ck_party_heads_seq CHECK (seq >= 1), 
	CONSTRAINT fk_party_heads_party_id FOREIGN KEY(party_id) REFERENCES parties (party_id)
)
 STRICT;
-- next
CREATE TRIGGER party_heads_stay BEFORE UPDATE ON party_heads WHEN NEW.party_id IS NOT OLD.party_id BEGIN SELECT RAISE(ABORT, 'what was written to party_heads stays'); END;
-- next
CREATE TRIGGER party_heads_remain BEFORE DELETE ON party_heads WHEN 1 BEGIN SELECT RAISE(ABORT, 'rows of party_heads are kept for ever'); END;
-- next
CREATE TRIGGER party_heads_rise BEFORE UPDATE ON party_heads WHEN NEW.seq <= OLD.seq BEGIN SELECT RAISE(ABORT, 'what a party has answered stays answered'); END;
-- next
CREATE TABLE answered_rounds (
	round_digest TEXT NOT NULL, 
	shard_version TEXT NOT NULL, 
	reservation_id TEXT NOT NULL, 
	ledger_seq INTEGER NOT NULL, 
	num_queries INTEGER NOT NULL, 
	task_digest TEXT NOT NULL, 
	recipients TEXT NOT NULL, 
	CONSTRAINT pk_answered_rounds PRIMARY KEY (round_digest), 
	CONSTRAINT uq_answered_rounds_reservation_id UNIQUE (reservation_id), 
	CONSTRAINT uq_answered_rounds_ledger_seq UNIQUE (ledger_seq), 
	CONSTRAINT ck_answered_rounds_queries CHECK (num_queries >= 1), 
	CONSTRAINT fk_answered_rounds_ledger_seq FOREIGN KEY(ledger_seq) REFERENCES ledger_entries (seq)
)
 STRICT;
-- next
CREATE INDEX ix_answered_rounds_task_digest ON answered_rounds (task_digest);
-- next
CREATE TRIGGER answered_rounds_stay BEFORE UPDATE ON answered_rounds WHEN NEW.round_digest IS NOT OLD.round_digest OR NEW.shard_version IS NOT OLD.shard_version OR NEW.reservation_id IS NOT OLD.reservation_id OR NEW.ledger_seq IS NOT OLD.ledger_seq OR NEW.num_queries IS NOT OLD.num_queries OR NEW.task_digest IS NOT OLD.task_digest OR NEW.recipients IS NOT OLD.recipients BEGIN SELECT RAISE(ABORT, 'what was written to answered_rounds stays'); END;
-- next
CREATE TRIGGER answered_rounds_remain BEFORE DELETE ON answered_rounds WHEN 1 BEGIN SELECT RAISE(ABORT, 'rows of answered_rounds are kept for ever'); END;
-- next
CREATE TRIGGER answered_rounds_paid BEFORE INSERT ON answered_rounds WHEN NOT EXISTS (SELECT 1 FROM ledger_entries WHERE ledger_entries.seq = NEW.ledger_seq AND ledger_entries.kind = 'post' AND ledger_entries.reservation_id = NEW.reservation_id) BEGIN SELECT RAISE(ABORT, 'an answer is paid for by an entry of the ledger'); END;
-- next
CREATE TABLE promised_rounds (
	reservation_id TEXT NOT NULL, 
	digest TEXT NOT NULL, 
	task_digest TEXT NOT NULL, 
	num_queries INTEGER NOT NULL, 
	amounts TEXT NOT NULL, 
	CONSTRAINT pk_promised_rounds PRIMARY KEY (reservation_id), 
	CONSTRAINT ck_promised_rounds_queries CHECK (num_queries >= 1), 
	CONSTRAINT fk_promised_rounds_digest FOREIGN KEY(digest) REFERENCES proposal_answers (digest)
)
 STRICT;
-- next
CREATE TRIGGER promised_rounds_stay BEFORE UPDATE ON promised_rounds WHEN NEW.reservation_id IS NOT OLD.reservation_id OR NEW.digest IS NOT OLD.digest OR NEW.task_digest IS NOT OLD.task_digest OR NEW.num_queries IS NOT OLD.num_queries OR NEW.amounts IS NOT OLD.amounts BEGIN SELECT RAISE(ABORT, 'what was written to promised_rounds stays'); END;
-- next
CREATE TRIGGER promised_rounds_remain BEFORE DELETE ON promised_rounds WHEN 1 BEGIN SELECT RAISE(ABORT, 'rows of promised_rounds are kept for ever'); END;
-- next
CREATE TABLE taken_by (
	reservation_id TEXT NOT NULL, 
	requester TEXT NOT NULL, 
	instance_nano INTEGER NOT NULL, 
	agent_nano INTEGER NOT NULL, 
	life_nano INTEGER NOT NULL, 
	CONSTRAINT pk_taken_by PRIMARY KEY (reservation_id), 
	CONSTRAINT ck_taken_by_amounts CHECK (instance_nano >= 0 AND agent_nano >= 0 AND life_nano >= 0), 
	CONSTRAINT fk_taken_by_reservation_id FOREIGN KEY(reservation_id) REFERENCES ledger_reservations (reservation_id)
)
 STRICT;
-- next
CREATE INDEX ix_taken_by_requester ON taken_by (requester);
-- next
CREATE TRIGGER taken_by_stay BEFORE UPDATE ON taken_by WHEN NEW.reservation_id IS NOT OLD.reservation_id OR NEW.requester IS NOT OLD.requester OR NEW.instance_nano IS NOT OLD.instance_nano OR NEW.agent_nano IS NOT OLD.agent_nano OR NEW.life_nano IS NOT OLD.life_nano BEGIN SELECT RAISE(ABORT, 'what was written to taken_by stays'); END;
-- next
CREATE TRIGGER taken_by_remain BEFORE DELETE ON taken_by WHEN 1 BEGIN SELECT RAISE(ABORT, 'rows of taken_by are kept for ever'); END;
-- next
CREATE TABLE tallier_shares (
	round_digest TEXT NOT NULL, 
	agent_id TEXT NOT NULL, 
	state TEXT NOT NULL, 
	share BLOB, 
	sharing_id BLOB, 
	fingerprint BLOB, 
	CONSTRAINT pk_tallier_shares PRIMARY KEY (round_digest, agent_id), 
	CONSTRAINT ck_tallier_shares_state CHECK (state IN ('dropped', 'excluded', 'held', 'summed')), 
	CONSTRAINT ck_tallier_shares_held CHECK ((state = 'held') = (share IS NOT NULL)), 
	CONSTRAINT ck_tallier_shares_known CHECK (state = 'excluded' OR (sharing_id IS NOT NULL AND fingerprint IS NOT NULL)), 
	CONSTRAINT fk_tallier_shares_round_digest FOREIGN KEY(round_digest) REFERENCES tallier_rounds (round_digest)
)
 STRICT;
-- next
CREATE TRIGGER tallier_shares_stay BEFORE UPDATE ON tallier_shares WHEN NEW.round_digest IS NOT OLD.round_digest OR NEW.agent_id IS NOT OLD.agent_id OR NEW.fingerprint IS NOT OLD.fingerprint OR NEW.sharing_id IS NOT OLD.sharing_id BEGIN SELECT RAISE(ABORT, 'what was written to tallier_shares stays'); END;
-- next
CREATE TRIGGER tallier_shares_remain BEFORE DELETE ON tallier_shares WHEN 1 BEGIN SELECT RAISE(ABORT, 'rows of tallier_shares are kept for ever'); END;
-- next
CREATE TRIGGER tallier_shares_over BEFORE UPDATE ON tallier_shares WHEN OLD.state <> 'held' AND NEW.state <> OLD.state BEGIN SELECT RAISE(ABORT, 'a share that was summed, excluded or dropped stays so'); END;
-- next
CREATE TRIGGER tallier_shares_late BEFORE INSERT ON tallier_shares WHEN NEW.state = 'held' AND NOT EXISTS (SELECT 1 FROM tallier_rounds WHERE tallier_rounds.round_digest = NEW.round_digest AND tallier_rounds.state = 'open') BEGIN SELECT RAISE(ABORT, 'a round that was summed or forgotten takes no share'); END;
-- next
CREATE TABLE idempotency_keys (
	token_id TEXT NOT NULL, 
	"key" TEXT NOT NULL, 
	body_digest TEXT NOT NULL, 
	job_id TEXT NOT NULL, 
	CONSTRAINT pk_idempotency_keys PRIMARY KEY (token_id, "key"), 
	CONSTRAINT fk_idempotency_keys_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id)
)
 STRICT;
-- next
CREATE TRIGGER idempotency_keys_stay BEFORE UPDATE ON idempotency_keys WHEN NEW.token_id IS NOT OLD.token_id OR NEW.key IS NOT OLD.key OR NEW.body_digest IS NOT OLD.body_digest OR NEW.job_id IS NOT OLD.job_id BEGIN SELECT RAISE(ABORT, 'what was written to idempotency_keys stays'); END;
-- next
CREATE TRIGGER idempotency_keys_remain BEFORE DELETE ON idempotency_keys WHEN 1 BEGIN SELECT RAISE(ABORT, 'rows of idempotency_keys are kept for ever'); END;
-- next
CREATE TABLE rounds (
	job_id TEXT NOT NULL, 
	number INTEGER NOT NULL, 
	first_query INTEGER NOT NULL, 
	num_queries INTEGER NOT NULL, 
	state TEXT NOT NULL, 
	batch_digest TEXT, 
	round_digest TEXT, 
	contributors TEXT, 
	ledger_seq INTEGER, 
	CONSTRAINT pk_rounds PRIMARY KEY (job_id, number), 
	CONSTRAINT uq_rounds_round_digest UNIQUE (round_digest), 
	CONSTRAINT ck_rounds_counts CHECK (number >= 0 AND first_query >= 0 AND num_queries >= 1), 
	CONSTRAINT ck_rounds_state CHECK (state IN ('agreed', 'asked', 'opened', 'posted', 'waiting')), 
	CONSTRAINT ck_rounds_digests CHECK ((batch_digest IS NULL) = (round_digest IS NULL)), 
	CONSTRAINT ck_rounds_asked CHECK (state = 'waiting' OR round_digest IS NOT NULL), 
	CONSTRAINT ck_rounds_agreed CHECK ((state IN ('agreed', 'posted', 'opened')) = (contributors IS NOT NULL)), 
	CONSTRAINT ck_rounds_posted CHECK ((state IN ('posted', 'opened')) = (ledger_seq IS NOT NULL)), 
	CONSTRAINT fk_rounds_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id)
)
 STRICT;
-- next
CREATE TRIGGER rounds_stay BEFORE UPDATE ON rounds WHEN NEW.job_id IS NOT OLD.job_id OR NEW.number IS NOT OLD.number OR NEW.first_query IS NOT OLD.first_query OR NEW.num_queries IS NOT OLD.num_queries BEGIN SELECT RAISE(ABORT, 'what was written to rounds stays'); END;
-- next
CREATE TRIGGER rounds_remain BEFORE DELETE ON rounds WHEN 1 BEGIN SELECT RAISE(ABORT, 'rows of rounds are kept for ever'); END;
-- next
CREATE TRIGGER rounds_once BEFORE UPDATE ON rounds WHEN (OLD.batch_digest IS NOT NULL AND NEW.batch_digest IS NOT OLD.batch_digest) OR (OLD.round_digest IS NOT NULL AND NEW.round_digest IS NOT OLD.round_digest) OR (OLD.contributors IS NOT NULL AND NEW.contributors IS NOT OLD.contributors) OR (OLD.ledger_seq IS NOT NULL AND NEW.ledger_seq IS NOT OLD.ledger_seq) BEGIN SELECT RAISE(ABORT, 'what a round was fixed to stays for ever'); END;
-- next
CREATE TRIGGER rounds_forward BEFORE UPDATE ON rounds WHEN (CASE NEW.state WHEN 'waiting' THEN 0 WHEN 'asked' THEN 1 WHEN 'agreed' THEN 2 WHEN 'posted' THEN 3 WHEN 'opened' THEN 4 END) - (CASE OLD.state WHEN 'waiting' THEN 0 WHEN 'asked' THEN 1 WHEN 'agreed' THEN 2 WHEN 'posted' THEN 3 WHEN 'opened' THEN 4 END) NOT IN (0, 1) BEGIN SELECT RAISE(ABORT, 'a round takes one step forward at a time'); END;
-- next
CREATE TRIGGER rounds_opened BEFORE UPDATE ON rounds WHEN NEW.state = 'opened' AND NOT EXISTS (SELECT 1 FROM releases WHERE releases.job_id = NEW.job_id AND releases.number = NEW.number) BEGIN SELECT RAISE(ABORT, 'a round is opened by storing its release'); END;
-- next
CREATE TRIGGER rounds_paid BEFORE UPDATE ON rounds WHEN NEW.state = 'posted' AND NOT EXISTS (SELECT 1 FROM ledger_entries WHERE ledger_entries.seq = NEW.ledger_seq AND ledger_entries.kind = 'post' AND ledger_entries.reservation_id = NEW.job_id || '/' || NEW.number) BEGIN SELECT RAISE(ABORT, 'a round is posted by an entry of the ledger that posts its charge'); END;
-- next
CREATE TRIGGER rounds_live BEFORE UPDATE ON rounds WHEN EXISTS (SELECT 1 FROM jobs WHERE jobs.job_id = NEW.job_id AND jobs.state IN ('cancelled', 'completed', 'expired', 'failed', 'refused')) BEGIN SELECT RAISE(ABORT, 'a round of a finished job never changes'); END;
-- next
CREATE TRIGGER rounds_begin BEFORE INSERT ON rounds WHEN NEW.state <> 'waiting' BEGIN SELECT RAISE(ABORT, 'a round begins as waiting'); END;
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
)
 STRICT;
-- next
CREATE TRIGGER job_answers_stay BEFORE UPDATE ON job_answers WHEN NEW.job_id IS NOT OLD.job_id OR NEW.agent_id IS NOT OLD.agent_id BEGIN SELECT RAISE(ABORT, 'what was written to job_answers stays'); END;
-- next
CREATE TABLE job_asked (
	job_id TEXT NOT NULL, 
	agents TEXT NOT NULL, 
	CONSTRAINT pk_job_asked PRIMARY KEY (job_id), 
	CONSTRAINT fk_job_asked_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id)
)
 STRICT;
-- next
CREATE TRIGGER job_asked_stay BEFORE UPDATE ON job_asked WHEN NEW.job_id IS NOT OLD.job_id OR NEW.agents IS NOT OLD.agents BEGIN SELECT RAISE(ABORT, 'what was written to job_asked stays'); END;
-- next
CREATE TRIGGER job_asked_remain BEFORE DELETE ON job_asked WHEN 1 BEGIN SELECT RAISE(ABORT, 'rows of job_asked are kept for ever'); END;
-- next
CREATE TABLE forgotten_jobs (
	job_id TEXT NOT NULL, 
	at TEXT NOT NULL, 
	because TEXT NOT NULL, 
	CONSTRAINT pk_forgotten_jobs PRIMARY KEY (job_id), 
	CONSTRAINT ck_forgotten_jobs_because CHECK (because IN ('age', 'asked')), 
	CONSTRAINT fk_forgotten_jobs_job_id FOREIGN KEY(job_id) REFERENCES jobs (job_id)
)
 STRICT;
-- next
CREATE TRIGGER forgotten_jobs_stay BEFORE UPDATE ON forgotten_jobs WHEN NEW.job_id IS NOT OLD.job_id OR NEW.at IS NOT OLD.at OR NEW.because IS NOT OLD.because BEGIN SELECT RAISE(ABORT, 'what was written to forgotten_jobs stays'); END;
-- next
CREATE TRIGGER forgotten_jobs_remain BEFORE DELETE ON forgotten_jobs WHEN 1 BEGIN SELECT RAISE(ABORT, 'rows of forgotten_jobs are kept for ever'); END;
-- next
CREATE TRIGGER forgotten_jobs_ended BEFORE INSERT ON forgotten_jobs WHEN NOT EXISTS (SELECT 1 FROM jobs WHERE jobs.job_id = NEW.job_id AND jobs.state IN ('cancelled', 'completed', 'expired', 'failed', 'refused')) BEGIN SELECT RAISE(ABORT, 'only a job that has ended is forgotten'); END;
-- next
CREATE TABLE agent_rounds (
	round_digest TEXT NOT NULL, 
	state TEXT NOT NULL, 
	kept_until TEXT NOT NULL, 
	answer BLOB, 
	CONSTRAINT pk_agent_rounds PRIMARY KEY (round_digest), 
	CONSTRAINT ck_agent_rounds_state CHECK (state IN ('charged', 'erased', 'stored')), 
	CONSTRAINT ck_agent_rounds_stored CHECK ((state = 'stored') = (answer IS NOT NULL)), 
	CONSTRAINT fk_agent_rounds_round_digest FOREIGN KEY(round_digest) REFERENCES answered_rounds (round_digest)
)
 STRICT;
-- next
CREATE TRIGGER agent_rounds_stay BEFORE UPDATE ON agent_rounds WHEN NEW.round_digest IS NOT OLD.round_digest OR NEW.kept_until IS NOT OLD.kept_until BEGIN SELECT RAISE(ABORT, 'what was written to agent_rounds stays'); END;
-- next
CREATE TRIGGER agent_rounds_remain BEFORE DELETE ON agent_rounds WHEN 1 BEGIN SELECT RAISE(ABORT, 'rows of agent_rounds are kept for ever'); END;
-- next
CREATE TRIGGER agent_rounds_once BEFORE UPDATE ON agent_rounds WHEN OLD.state = 'erased' OR NEW.state = 'charged' OR (OLD.answer IS NOT NULL AND NEW.answer IS NOT NULL AND NEW.answer IS NOT OLD.answer) BEGIN SELECT RAISE(ABORT, 'an answer is stored once and erased for ever'); END;
-- next
CREATE TABLE planned_batches (
	job_id TEXT NOT NULL, 
	number INTEGER NOT NULL, 
	batch_digest TEXT NOT NULL, 
	round_digest TEXT NOT NULL, 
	CONSTRAINT pk_planned_batches PRIMARY KEY (job_id, number), 
	CONSTRAINT fk_planned_batches_job_id_number FOREIGN KEY(job_id, number) REFERENCES rounds (job_id, number)
)
 STRICT;
-- next
CREATE INDEX ix_planned_batches_round_digest ON planned_batches (round_digest);
-- next
CREATE TRIGGER planned_batches_stay BEFORE UPDATE ON planned_batches WHEN NEW.job_id IS NOT OLD.job_id OR NEW.number IS NOT OLD.number OR NEW.batch_digest IS NOT OLD.batch_digest OR NEW.round_digest IS NOT OLD.round_digest BEGIN SELECT RAISE(ABORT, 'what was written to planned_batches stays'); END;
-- next
CREATE TRIGGER planned_batches_remain BEFORE DELETE ON planned_batches WHEN 1 BEGIN SELECT RAISE(ABORT, 'rows of planned_batches are kept for ever'); END;
-- next
CREATE TABLE round_participants (
	job_id TEXT NOT NULL, 
	number INTEGER NOT NULL, 
	verify_keys TEXT NOT NULL, 
	CONSTRAINT pk_round_participants PRIMARY KEY (job_id, number), 
	CONSTRAINT fk_round_participants_job_id_number FOREIGN KEY(job_id, number) REFERENCES rounds (job_id, number)
)
 STRICT;
-- next
CREATE TRIGGER round_participants_stay BEFORE UPDATE ON round_participants WHEN NEW.job_id IS NOT OLD.job_id OR NEW.number IS NOT OLD.number OR NEW.verify_keys IS NOT OLD.verify_keys BEGIN SELECT RAISE(ABORT, 'what was written to round_participants stays'); END;
-- next
CREATE TRIGGER round_participants_remain BEFORE DELETE ON round_participants WHEN 1 BEGIN SELECT RAISE(ABORT, 'rows of round_participants are kept for ever'); END;
-- next
CREATE TABLE round_shares (
	job_id TEXT NOT NULL, 
	number INTEGER NOT NULL, 
	CONSTRAINT pk_round_shares PRIMARY KEY (job_id, number), 
	CONSTRAINT fk_round_shares_job_id_number FOREIGN KEY(job_id, number) REFERENCES rounds (job_id, number)
)
 STRICT;
-- next
CREATE TRIGGER round_shares_stay BEFORE UPDATE ON round_shares WHEN NEW.job_id IS NOT OLD.job_id OR NEW.number IS NOT OLD.number BEGIN SELECT RAISE(ABORT, 'what was written to round_shares stays'); END;
-- next
CREATE TRIGGER round_shares_remain BEFORE DELETE ON round_shares WHEN 1 BEGIN SELECT RAISE(ABORT, 'rows of round_shares are kept for ever'); END;
-- next
CREATE TABLE round_holdings (
	job_id TEXT NOT NULL, 
	number INTEGER NOT NULL, 
	tallier_id TEXT NOT NULL, 
	holdings TEXT NOT NULL, 
	CONSTRAINT pk_round_holdings PRIMARY KEY (job_id, number, tallier_id), 
	CONSTRAINT fk_round_holdings_job_id_number FOREIGN KEY(job_id, number) REFERENCES rounds (job_id, number)
)
 STRICT;
-- next
CREATE TABLE round_refusals (
	job_id TEXT NOT NULL, 
	number INTEGER NOT NULL, 
	agent_id TEXT NOT NULL, 
	sentence TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	CONSTRAINT pk_round_refusals PRIMARY KEY (job_id, number, agent_id), 
	CONSTRAINT ck_round_refusals_kind CHECK (kind IN ('final', 'passing')), 
	CONSTRAINT fk_round_refusals_job_id_number FOREIGN KEY(job_id, number) REFERENCES rounds (job_id, number)
)
 STRICT;
-- next
CREATE TABLE releases (
	job_id TEXT NOT NULL, 
	number INTEGER NOT NULL, 
	data BLOB NOT NULL, 
	CONSTRAINT pk_releases PRIMARY KEY (job_id, number), 
	CONSTRAINT fk_releases_job_id_number FOREIGN KEY(job_id, number) REFERENCES rounds (job_id, number)
)
 STRICT;
-- next
CREATE TRIGGER releases_stay BEFORE UPDATE ON releases WHEN NEW.job_id IS NOT OLD.job_id OR NEW.number IS NOT OLD.number OR NEW.data IS NOT OLD.data BEGIN SELECT RAISE(ABORT, 'what was written to releases stays'); END;
-- next
CREATE TRIGGER releases_remain BEFORE DELETE ON releases WHEN 1 BEGIN SELECT RAISE(ABORT, 'rows of releases are kept for ever'); END;
-- next
CREATE TRIGGER releases_paid BEFORE INSERT ON releases WHEN NOT EXISTS (SELECT 1 FROM rounds WHERE rounds.job_id = NEW.job_id AND rounds.number = NEW.number AND rounds.state = 'posted') BEGIN SELECT RAISE(ABORT, 'only a round that was paid for is released'); END;
-- next
CREATE TABLE aggregate_shares (
	round_digest TEXT NOT NULL, 
	tallier_id TEXT NOT NULL, 
	data BLOB, 
	data_digest TEXT NOT NULL, 
	CONSTRAINT pk_aggregate_shares PRIMARY KEY (round_digest, tallier_id), 
	CONSTRAINT fk_aggregate_shares_round_digest FOREIGN KEY(round_digest) REFERENCES rounds (round_digest)
)
 STRICT;
-- next
CREATE TRIGGER aggregate_shares_stay BEFORE UPDATE ON aggregate_shares WHEN NEW.round_digest IS NOT OLD.round_digest OR NEW.tallier_id IS NOT OLD.tallier_id OR NEW.data_digest IS NOT OLD.data_digest BEGIN SELECT RAISE(ABORT, 'what was written to aggregate_shares stays'); END;
-- next
CREATE TRIGGER aggregate_shares_remain BEFORE DELETE ON aggregate_shares WHEN 1 BEGIN SELECT RAISE(ABORT, 'rows of aggregate_shares are kept for ever'); END;
-- next
CREATE TRIGGER aggregate_shares_dropped BEFORE UPDATE ON aggregate_shares WHEN NEW.data IS NOT NULL AND NEW.data IS NOT OLD.data BEGIN SELECT RAISE(ABORT, 'a sum is kept or dropped, never replaced'); END
