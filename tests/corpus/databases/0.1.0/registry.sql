BEGIN TRANSACTION;
CREATE TABLE agents (
	name VARCHAR(128) NOT NULL, 
	target VARCHAR(128) NOT NULL, 
	targets_pool BOOLEAN NOT NULL, 
	description TEXT NOT NULL, 
	system_prompt TEXT NOT NULL, 
	default_params TEXT NOT NULL, 
	behaviour TEXT, 
	created_at DATETIME NOT NULL, 
	runner VARCHAR(128) NOT NULL, 
	CONSTRAINT pk_agents PRIMARY KEY (name), 
	CONSTRAINT fk_agents_runner FOREIGN KEY(runner) REFERENCES runners (name) ON DELETE CASCADE
);
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0007');
CREATE TABLE api_keys (
	id VARCHAR(128) NOT NULL, 
	description TEXT NOT NULL, 
	tenant VARCHAR(64) NOT NULL, 
	scopes TEXT NOT NULL, 
	digest BLOB NOT NULL, 
	previous_digest BLOB NOT NULL, 
	previous_expires_at DATETIME, 
	created_at DATETIME NOT NULL, 
	expires_at DATETIME, 
	revoked_at DATETIME, 
	rotated_at DATETIME, 
	CONSTRAINT pk_api_keys PRIMARY KEY (id)
);
INSERT INTO "api_keys" VALUES('osoyv4sk34jf','Ann''s notebook','team-a','["inference:create", "inference:edit", "models:view"]',X'1C4740B00344E576B4567DFFB18A5A5859181594794344EF07FE120C2BD6BCA3',X'',NULL,'2026-11-21 19:31:57.206042',NULL,NULL,NULL);
CREATE TABLE audit_entries (
	sequence BIGINT NOT NULL, 
	at DATETIME NOT NULL, 
	event VARCHAR(64) NOT NULL, 
	actor TEXT NOT NULL, 
	operation VARCHAR(160) NOT NULL, 
	detail TEXT NOT NULL, 
	previous_hash VARCHAR(64) NOT NULL, 
	hash VARCHAR(64) NOT NULL, 
	CONSTRAINT pk_audit_entries PRIMARY KEY (sequence)
);
INSERT INTO "audit_entries" VALUES(1,'2026-11-21 19:32:04.387351','operation.accepted','cli:root@vm','operations/op-816e567f9ccbf2bde18cfdce','{"action":{"flush_cache":{"scope":"SCOPE_TENANT","tenant":"team-a"}},"action_sha256":"cd2ad7a5ce264f4ecd46bf6bbfd437cce5bd5122b4d9b895ff82db43f20c5e34","request_id":"op-4da760760e3b03c300590bf4","signers":[]}','0000000000000000000000000000000000000000000000000000000000000000','eb91ff051bcee0a4ea5fedbe938e187b44046cb46ad3896837cb86de415108fb');
INSERT INTO "audit_entries" VALUES(2,'2026-11-21 19:32:04.492328','operation.started','','operations/op-816e567f9ccbf2bde18cfdce','{}','eb91ff051bcee0a4ea5fedbe938e187b44046cb46ad3896837cb86de415108fb','fa08882ac0277d31b61756a665b40b98e16954c2a0fab7c4825695c355bb2e05');
INSERT INTO "audit_entries" VALUES(3,'2026-11-21 19:32:04.520451','operation.succeeded','a','operations/op-816e567f9ccbf2bde18cfdce','{"detail":""}','fa08882ac0277d31b61756a665b40b98e16954c2a0fab7c4825695c355bb2e05','871edc26eca02fbae74ee5509b43a9ab8d82f713f59f3f37460400fb658c75dc');
INSERT INTO "audit_entries" VALUES(4,'2026-11-21 19:32:08.627611','operation.accepted','cli:root@vm','operations/op-ef482f252b8c24f9bfbdf1fb','{"action":{"unload_model":{"model":"m-a"}},"action_sha256":"407a3eab0ceef96ccb3487ff597a015159ada8a5d1ca7ab10dbedfdf7873ea49","request_id":"op-6e809efabfa74117edeeb2d7","signers":[]}','871edc26eca02fbae74ee5509b43a9ab8d82f713f59f3f37460400fb658c75dc','324791d2207f151f408f7bc5c0415c3f901705e2b553c7e63b409694b890cd43');
INSERT INTO "audit_entries" VALUES(5,'2026-11-21 19:32:08.664850','operation.started','','operations/op-ef482f252b8c24f9bfbdf1fb','{}','324791d2207f151f408f7bc5c0415c3f901705e2b553c7e63b409694b890cd43','b5bcab279f0c8fa840dc7f96db8fb7aaa96edac5a43e21d2041685aa0e175dac');
INSERT INTO "audit_entries" VALUES(6,'2026-11-21 19:32:08.861802','operation.succeeded','','operations/op-ef482f252b8c24f9bfbdf1fb','{"detail":""}','b5bcab279f0c8fa840dc7f96db8fb7aaa96edac5a43e21d2041685aa0e175dac','9ad70233b474c739ebe3227009694917f592e0bc0ccdd9d168adf5ac6611be34');
INSERT INTO "audit_entries" VALUES(7,'2026-11-21 19:32:11.275547','operation.accepted','cli:root@vm','operations/op-7219f17e1bd2a0ec63adcbe2','{"action":{"load_model":{"model":"m-a","options":{"parameters":{"context_tokens":{"integer":"2048"}}}}},"action_sha256":"d6ec0a1e014878a0728ea2f4cb3b2326000a00862dfdc9232a281cccc3db07b7","request_id":"op-983b82aebc210ad2be9108b8","signers":[]}','9ad70233b474c739ebe3227009694917f592e0bc0ccdd9d168adf5ac6611be34','ce1064c2da9c0097fea2ac0ca2854fc9f20759e074cbd3df56cee89038a22696');
INSERT INTO "audit_entries" VALUES(8,'2026-11-21 19:32:11.302146','operation.started','','operations/op-7219f17e1bd2a0ec63adcbe2','{}','ce1064c2da9c0097fea2ac0ca2854fc9f20759e074cbd3df56cee89038a22696','ba4e3e6b06fc52408159ce327fe226c92f19fdcb166e63ddb459c8623c785c88');
INSERT INTO "audit_entries" VALUES(9,'2026-11-21 19:32:13.244134','operation.succeeded','a','operations/op-7219f17e1bd2a0ec63adcbe2','{"detail":""}','ba4e3e6b06fc52408159ce327fe226c92f19fdcb166e63ddb459c8623c785c88','22bb595deb0def0e4cbba0f44ca0cc3d0c053b84eb18e20506a2370d6881f280');
CREATE TABLE declared_agents (
	name VARCHAR(128) NOT NULL, 
	target VARCHAR(128) NOT NULL, 
	targets_pool BOOLEAN NOT NULL, 
	description TEXT NOT NULL, 
	system_prompt TEXT NOT NULL, 
	default_params TEXT NOT NULL, 
	behaviour TEXT, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_declared_agents PRIMARY KEY (name)
);
INSERT INTO "declared_agents" VALUES('scholar','m-asleep',0,'Reads – and answers.','Answer briefly.
Cite nothing.','{"logitBias":{"7":-1.5},"maxTokens":64,"stop":["END"],"temperature":0.25}','{"max_tool_iterations": 3, "parse_text_tool_calls": false, "platform_prompt": true, "repetition": "warn", "signals": ["NEEDS_HIGHER_REASONER"], "stop_on_decision_request": false, "tools": ["search"]}','2026-11-21 19:31:52.581336');
INSERT INTO "declared_agents" VALUES('pooled','pool',1,'','','{}',NULL,'2026-11-21 19:31:52.581336');
CREATE TABLE declared_models (
	name VARCHAR(128) NOT NULL, 
	pool_name VARCHAR(128) NOT NULL, 
	operations VARCHAR(64) NOT NULL, 
	context_tokens INTEGER NOT NULL, 
	digest VARCHAR(128) NOT NULL, 
	remote BOOLEAN NOT NULL, 
	wake TEXT, 
	skills VARCHAR(64), 
	created_at DATETIME NOT NULL, 
	runner VARCHAR(128) NOT NULL, 
	CONSTRAINT pk_declared_models PRIMARY KEY (name)
);
INSERT INTO "declared_models" VALUES('m-asleep','sleepers','chat',4096,'sha256:abababababababababababababababababababababababababababababababab',0,'{"by_mesh": {"http": {"headers": {"X-Profile": "r\u00e4um"}, "method": "PUT", "url": "http://127.0.0.1:9/wake"}}, "by_runner": false, "max_wait_seconds": 7.5}','text,tools','2026-11-21 19:31:52.581336','');
INSERT INTO "declared_models" VALUES('m-card','','chat,completion',0,'',0,'{"by_mesh": {"wake_on_lan": {"broadcast_address": "255.255.255.255", "mac_address": "00:11:22:33:44:55", "port": 7}}, "by_runner": false, "max_wait_seconds": 60.0}',NULL,'2026-11-21 19:31:52.581336','');
INSERT INTO "declared_models" VALUES('m-absent','','chat,completion',0,'',0,NULL,NULL,'2026-11-21 19:31:52.581336','');
INSERT INTO "declared_models" VALUES('m-program','','chat,completion',0,'',0,'{"by_mesh": {"command": {"argv": ["true", "--now"]}}, "by_runner": false, "max_wait_seconds": 60.0}',NULL,'2026-11-21 19:31:52.581336','');
CREATE TABLE declared_routes (
	name VARCHAR(128) NOT NULL, 
	description TEXT NOT NULL, 
	candidates TEXT NOT NULL, 
	budget_seconds FLOAT, 
	keep_alive_seconds FLOAT, 
	pin_primary BOOLEAN NOT NULL, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_declared_routes PRIMARY KEY (name)
);
INSERT INTO "declared_routes" VALUES('ladder','','m-a,m-asleep',30.0,300.0,1,'2026-11-21 19:31:52.581336');
CREATE TABLE governance_marks (
	id INTEGER NOT NULL, 
	audience VARCHAR(128) NOT NULL, 
	newest_issued_at DATETIME, 
	CONSTRAINT pk_governance_marks PRIMARY KEY (id)
);
INSERT INTO "governance_marks" VALUES(1,'reg-90b340c41ae63e1f79a19aa9',NULL);
CREATE TABLE join_tokens (
	id VARCHAR(128) NOT NULL, 
	description TEXT NOT NULL, 
	secret_sha256 VARCHAR(64) NOT NULL, 
	created_at DATETIME NOT NULL, 
	expires_at DATETIME, 
	CONSTRAINT pk_join_tokens PRIMARY KEY (id)
);
CREATE TABLE key_pepper (
	id INTEGER NOT NULL, 
	mark BLOB NOT NULL, 
	CONSTRAINT pk_key_pepper PRIMARY KEY (id)
);
INSERT INTO "key_pepper" VALUES(1,X'47EF65B4120E2A4618936CD78A913CD4D2F64485637E4B9272EB67F9509A22DF');
CREATE TABLE lease_counter (
	id INTEGER NOT NULL, 
	last_fencing_number BIGINT NOT NULL, 
	CONSTRAINT pk_lease_counter PRIMARY KEY (id)
);
CREATE TABLE leases (
	id VARCHAR(128) NOT NULL, 
	fencing_number BIGINT NOT NULL, 
	request_id VARCHAR(128) NOT NULL, 
	host VARCHAR(255) NOT NULL, 
	holder_kind INTEGER NOT NULL, 
	holder_name VARCHAR(128) NOT NULL, 
	holder_incarnation VARCHAR(128) NOT NULL, 
	purpose VARCHAR(256) NOT NULL, 
	shares TEXT NOT NULL, 
	processes TEXT NOT NULL, 
	pinned BOOLEAN NOT NULL, 
	priority INTEGER NOT NULL, 
	releasing BOOLEAN NOT NULL, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_leases PRIMARY KEY (id), 
	CONSTRAINT uq_leases_fencing_number UNIQUE (fencing_number)
);
CREATE TABLE mesh_settings (
	id INTEGER NOT NULL, 
	allow_cloud_fallback BOOLEAN NOT NULL, 
	revision BIGINT NOT NULL, 
	CONSTRAINT pk_mesh_settings PRIMARY KEY (id)
);
INSERT INTO "mesh_settings" VALUES(1,0,2);
CREATE TABLE models (
	name VARCHAR(128) NOT NULL, 
	pool_name VARCHAR(128) NOT NULL, 
	operations VARCHAR(64) NOT NULL, 
	context_tokens INTEGER NOT NULL, 
	digest VARCHAR(128) NOT NULL, 
	remote BOOLEAN NOT NULL, 
	wake TEXT, 
	skills VARCHAR(64), 
	created_at DATETIME NOT NULL, 
	runner VARCHAR(128) NOT NULL, 
	CONSTRAINT pk_models PRIMARY KEY (name), 
	CONSTRAINT fk_models_runner FOREIGN KEY(runner) REFERENCES runners (name) ON DELETE CASCADE
);
INSERT INTO "models" VALUES('m-a','pool','chat,completion,embedding,tokenize',2048,'',0,'{"by_runner": true, "max_wait_seconds": 600.0}',NULL,'2026-11-21 19:31:48.865744','a');
CREATE TABLE operations (
	number BIGINT NOT NULL, 
	id VARCHAR(128) NOT NULL, 
	request_id VARCHAR(128) NOT NULL, 
	action BLOB NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	requested_by TEXT NOT NULL, 
	signers TEXT NOT NULL, 
	runner VARCHAR(128) NOT NULL, 
	reason VARCHAR(64) NOT NULL, 
	detail TEXT NOT NULL, 
	result BLOB NOT NULL, 
	cancel_requested BOOLEAN NOT NULL, 
	created_at DATETIME NOT NULL, 
	started_at DATETIME, 
	ended_at DATETIME, 
	CONSTRAINT pk_operations PRIMARY KEY (number), 
	CONSTRAINT uq_operations_id UNIQUE (id), 
	CONSTRAINT uq_operations_request_id UNIQUE (request_id)
);
INSERT INTO "operations" VALUES(1,'op-816e567f9ccbf2bde18cfdce','op-4da760760e3b03c300590bf4',X'1A0A08031A067465616D2D61','succeeded','cli:root@vm','[]','a','unspecified','',X'280138004000',0,'2026-11-21 19:32:04.387188','2026-11-21 19:32:04.492323','2026-11-21 19:32:04.520441');
INSERT INTO "operations" VALUES(2,'op-ef482f252b8c24f9bfbdf1fb','op-6e809efabfa74117edeeb2d7',X'12050A036D2D61','succeeded','cli:root@vm','[]','','unspecified','',X'28014A036D2D61',0,'2026-11-21 19:32:08.627394','2026-11-21 19:32:08.664843','2026-11-21 19:32:08.861792');
INSERT INTO "operations" VALUES(3,'op-7219f17e1bd2a0ec63adcbe2','op-983b82aebc210ad2be9108b8',X'0A1E0A036D2D6112170A150A0E636F6E746578745F746F6B656E731203088010','succeeded','cli:root@vm','[]','a','unspecified','',X'1A08080110A0A5C28E034A036D2D61',0,'2026-11-21 19:32:11.275405','2026-11-21 19:32:11.302141','2026-11-21 19:32:13.244126');
CREATE TABLE ownership (
	id INTEGER NOT NULL, 
	owner VARCHAR(64) NOT NULL, 
	CONSTRAINT pk_ownership PRIMARY KEY (id)
);
CREATE TABLE runners (
	name VARCHAR(128) NOT NULL, 
	session_id VARCHAR(128) NOT NULL, 
	incarnation VARCHAR(128) NOT NULL, 
	address VARCHAR(512) NOT NULL, 
	host VARCHAR(255) NOT NULL, 
	runtime VARCHAR(128) NOT NULL, 
	version VARCHAR(128) NOT NULL, 
	standing VARCHAR(16) NOT NULL, 
	last_heartbeat_at DATETIME NOT NULL, 
	inactive_since DATETIME, 
	dial_out BOOLEAN DEFAULT 0 NOT NULL, 
	CONSTRAINT pk_runners PRIMARY KEY (name), 
	CONSTRAINT uq_runners_session_id UNIQUE (session_id), 
	CONSTRAINT fk_runners_session_id FOREIGN KEY(session_id) REFERENCES sessions (id) ON DELETE CASCADE
);
INSERT INTO "runners" VALUES('a','ses-20a61a73d10fe4359b9d4269','run-89d6ca6272333f511d324b3b','unix:/tmp/tmp8xzrf38t/home/run/runner-a.sock','vm','llama_server','0.1.0','closed','2026-11-21 19:32:34.815043','2026-11-21 19:32:34.817628',0);
CREATE TABLE sessions (
	id VARCHAR(128) NOT NULL, 
	request_id VARCHAR(128) NOT NULL, 
	ticket_key BLOB NOT NULL, 
	CONSTRAINT pk_sessions PRIMARY KEY (id)
);
INSERT INTO "sessions" VALUES('ses-20a61a73d10fe4359b9d4269','open-e89da8652d8565e55e26cac7',X'361A2E2424F1FCF4E148E0EE2FC470F083423CE6B9523120D93CDF7F1B6ED60E');
CREATE TABLE used_nonces (
	nonce VARCHAR(128) NOT NULL, 
	operation_id VARCHAR(128) NOT NULL, 
	kept_until DATETIME NOT NULL, 
	CONSTRAINT pk_used_nonces PRIMARY KEY (nonce)
);
CREATE INDEX ix_operations_ended_at ON operations (ended_at);
CREATE INDEX ix_used_nonces_kept_until ON used_nonces (kept_until);
CREATE INDEX ix_models_runner ON models (runner);
CREATE INDEX ix_agents_runner ON agents (runner);
COMMIT;
