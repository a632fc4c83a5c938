BEGIN TRANSACTION;
CREATE TABLE agents (
	name VARCHAR(128) NOT NULL, 
	target VARCHAR(128) NOT NULL, 
	targets_pool BOOLEAN NOT NULL, 
	description TEXT NOT NULL, 
	system_prompt TEXT NOT NULL, 
	default_params TEXT NOT NULL, 
	behaviour TEXT, 
	tags BLOB, 
	created_at DATETIME NOT NULL, 
	runner VARCHAR(128) NOT NULL, 
	CONSTRAINT pk_agents PRIMARY KEY (name), 
	CONSTRAINT fk_agents_runner FOREIGN KEY(runner) REFERENCES runners (name) ON DELETE CASCADE
);
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0018');
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
INSERT INTO "api_keys" VALUES('2mmatelgtqb8','Ann''s notebook','team-a','["inference:create", "inference:edit", "models:view"]',X'51EA490FEA092A585EEED4816A19EA0E047F40F79869E78BD4ADD180416C5DEC',X'',NULL,'2026-11-26 06:26:24.410633',NULL,NULL,NULL);
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
INSERT INTO "audit_entries" VALUES(1,'2026-11-26 06:26:26.270111','operation.accepted','cli:root@vm','operations/op-b65caca9441b5522b946e209','{"action":{"flush_cache":{"scope":"SCOPE_TENANT","tenant":"team-a"}},"action_sha256":"cd2ad7a5ce264f4ecd46bf6bbfd437cce5bd5122b4d9b895ff82db43f20c5e34","request_id":"op-e75a1c0c60c776de19c29ef2","signers":[]}','0000000000000000000000000000000000000000000000000000000000000000','01b3284819209562820fc46a36725397a1a8cc7f6245886b64bb22abf48c726f');
INSERT INTO "audit_entries" VALUES(2,'2026-11-26 06:26:26.275245','operation.started','','operations/op-b65caca9441b5522b946e209','{}','01b3284819209562820fc46a36725397a1a8cc7f6245886b64bb22abf48c726f','b7049f9b4b0e21b6af966f90b592ed7d78051cde10a3811d8986d2b5695c681b');
INSERT INTO "audit_entries" VALUES(3,'2026-11-26 06:26:26.328581','operation.succeeded','a','operations/op-b65caca9441b5522b946e209','{"detail":""}','b7049f9b4b0e21b6af966f90b592ed7d78051cde10a3811d8986d2b5695c681b','e6753d91e4a9878173025644e12c5820e42f073424e98187a5435b960026494a');
INSERT INTO "audit_entries" VALUES(4,'2026-11-26 06:26:28.659845','operation.accepted','cli:root@vm','operations/op-f95f2d8ab6f7654cbd6bfa8f','{"action":{"unload_model":{"model":"m-a"}},"action_sha256":"407a3eab0ceef96ccb3487ff597a015159ada8a5d1ca7ab10dbedfdf7873ea49","request_id":"op-93d9ae9fbbad0b385d00cc28","signers":[]}','e6753d91e4a9878173025644e12c5820e42f073424e98187a5435b960026494a','982c454a22573c4122162bf05cb61b609cab1ccdc18e5af0bc5c65319d0b14f3');
INSERT INTO "audit_entries" VALUES(5,'2026-11-26 06:26:28.738410','operation.started','','operations/op-f95f2d8ab6f7654cbd6bfa8f','{}','982c454a22573c4122162bf05cb61b609cab1ccdc18e5af0bc5c65319d0b14f3','0f6e54e600ea4f1ec9b242eea2ef9d0ba4ba6fd66cec06bc05756d86c4ad9910');
INSERT INTO "audit_entries" VALUES(6,'2026-11-26 06:26:28.789841','operation.succeeded','','operations/op-f95f2d8ab6f7654cbd6bfa8f','{"detail":""}','0f6e54e600ea4f1ec9b242eea2ef9d0ba4ba6fd66cec06bc05756d86c4ad9910','3dbaf9902d6749a1d619b646af11b3730053285b990f675287cb6193f1ca7c31');
INSERT INTO "audit_entries" VALUES(7,'2026-11-26 06:26:31.140979','operation.accepted','cli:root@vm','operations/op-36f4d2152d07b4beb33d8f2e','{"action":{"load_model":{"model":"m-a","options":{"parameters":{"context_tokens":{"integer":"2048"}}}}},"action_sha256":"d6ec0a1e014878a0728ea2f4cb3b2326000a00862dfdc9232a281cccc3db07b7","request_id":"op-ee1c7bd814d7b66a23debcbf","signers":[]}','3dbaf9902d6749a1d619b646af11b3730053285b990f675287cb6193f1ca7c31','93b94ba1b8acfcb2951a49533c3ca7b54515b8cec943ca8ccab0069ac89b95db');
INSERT INTO "audit_entries" VALUES(8,'2026-11-26 06:26:31.178060','operation.started','','operations/op-36f4d2152d07b4beb33d8f2e','{}','93b94ba1b8acfcb2951a49533c3ca7b54515b8cec943ca8ccab0069ac89b95db','186278896dd4630187d091666af541cc8a3614942965531db8eac6bd7ff72111');
INSERT INTO "audit_entries" VALUES(9,'2026-11-26 06:26:32.302714','operation.succeeded','a','operations/op-36f4d2152d07b4beb33d8f2e','{"detail":""}','186278896dd4630187d091666af541cc8a3614942965531db8eac6bd7ff72111','3f335f21ac484b2ddb5f0f2f908bbdf580a6d8349c8877dca665c89cf06c07da');
CREATE TABLE declared_agents (
	name VARCHAR(128) NOT NULL, 
	target VARCHAR(128) NOT NULL, 
	targets_pool BOOLEAN NOT NULL, 
	description TEXT NOT NULL, 
	system_prompt TEXT NOT NULL, 
	default_params TEXT NOT NULL, 
	behaviour TEXT, 
	tags BLOB, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_declared_agents PRIMARY KEY (name)
);
INSERT INTO "declared_agents" VALUES('scholar','m-asleep',0,'Reads – and answers.','Answer briefly.
Cite nothing.','{"logitBias":{"7":-1.5},"maxTokens":64,"stop":["END"],"temperature":0.25}','{"max_tool_iterations": 3, "parse_text_tool_calls": false, "platform_prompt": true, "repetition": "warn", "signals": ["NEEDS_HIGHER_REASONER"], "stop_on_decision_request": false, "tools": ["search"]}',NULL,'2026-11-26 06:26:23.426705');
INSERT INTO "declared_agents" VALUES('pooled','pool',1,'','','{}',NULL,NULL,'2026-11-26 06:26:23.426705');
CREATE TABLE declared_aliases (
	name VARCHAR(128) NOT NULL, 
	manifest BLOB NOT NULL, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_declared_aliases PRIMARY KEY (name)
);
CREATE TABLE declared_models (
	name VARCHAR(128) NOT NULL, 
	pool_name VARCHAR(128) NOT NULL, 
	operations VARCHAR(64) NOT NULL, 
	context_tokens INTEGER NOT NULL, 
	digest VARCHAR(128) NOT NULL, 
	remote BOOLEAN NOT NULL, 
	wake TEXT, 
	skills VARCHAR(64), 
	tags BLOB, 
	upstream TEXT, 
	journal VARCHAR(16), 
	created_at DATETIME NOT NULL, 
	runner VARCHAR(128) NOT NULL, 
	provider BLOB, 
	CONSTRAINT pk_declared_models PRIMARY KEY (name)
);
INSERT INTO "declared_models" VALUES('m-asleep','sleepers','chat',4096,'sha256:abababababababababababababababababababababababababababababababab',0,'{"by_mesh": {"http": {"headers": {"X-Profile": "r\u00e4um"}, "method": "PUT", "url": "http://127.0.0.1:9/wake"}}, "by_runner": false, "max_wait_seconds": 7.5}','text,tools',NULL,NULL,NULL,'2026-11-26 06:26:23.426705','',NULL);
INSERT INTO "declared_models" VALUES('m-card','','chat,completion',0,'',0,'{"by_mesh": {"wake_on_lan": {"broadcast_address": "255.255.255.255", "mac_address": "00:11:22:33:44:55", "port": 7}}, "by_runner": false, "max_wait_seconds": 60.0}',NULL,NULL,NULL,NULL,'2026-11-26 06:26:23.426705','',NULL);
INSERT INTO "declared_models" VALUES('m-absent','','chat,completion',0,'',0,NULL,NULL,NULL,NULL,NULL,'2026-11-26 06:26:23.426705','',NULL);
INSERT INTO "declared_models" VALUES('m-program','','chat,completion',0,'',0,'{"by_mesh": {"command": {"argv": ["true", "--now"]}}, "by_runner": false, "max_wait_seconds": 60.0}',NULL,NULL,NULL,NULL,'2026-11-26 06:26:23.426705','',NULL);
CREATE TABLE declared_profiles (
	name VARCHAR(128) NOT NULL, 
	manifest BLOB NOT NULL, 
	created_at DATETIME NOT NULL, 
	active_since DATETIME, 
	CONSTRAINT pk_declared_profiles PRIMARY KEY (name)
);
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
INSERT INTO "declared_routes" VALUES('ladder','','m-a,m-asleep',30.0,300.0,1,'2026-11-26 06:26:23.426705');
CREATE TABLE declared_tenants (
	name VARCHAR(128) NOT NULL, 
	manifest BLOB NOT NULL, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_declared_tenants PRIMARY KEY (name)
);
CREATE TABLE declared_workflows (
	name VARCHAR(128) NOT NULL, 
	manifest BLOB NOT NULL, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_declared_workflows PRIMARY KEY (name)
);
CREATE TABLE events (
	sequence BIGINT NOT NULL, 
	event BLOB NOT NULL, 
	CONSTRAINT pk_events PRIMARY KEY (sequence)
);
INSERT INTO "events" VALUES(1,X'0801120C088DA29FD80610D0EDF1BC01180122036D2D61280132197075626C6973686564206279207468652072756E6E65722061');
INSERT INTO "events" VALUES(2,X'0802120C088DA29FD80610D0EDF1BC0118032201612801320F6A6F696E656420746865206D657368');
INSERT INTO "events" VALUES(3,X'0803120C088DA29FD806109080BD9503180122036D2D61280232217468652072756E6E65722061206F70656E65642061206E65772073657373696F6E');
INSERT INTO "events" VALUES(4,X'0804120C088DA29FD806109080BD95031803220161280232217468652072756E6E65722061206F70656E65642061206E65772073657373696F6E');
INSERT INTO "events" VALUES(5,X'0805120C088FA29FD80610F0E2C9CE01180122086D2D61736C656570280932176465636C6172656420627920616E206F70657261746F72');
INSERT INTO "events" VALUES(6,X'0806120C088FA29FD80610F0E2C9CE01180122066D2D63617264280932176465636C6172656420627920616E206F70657261746F72');
INSERT INTO "events" VALUES(7,X'0807120C088FA29FD80610F0E2C9CE01180122086D2D616273656E74280932176465636C6172656420627920616E206F70657261746F72');
INSERT INTO "events" VALUES(8,X'0808120C088FA29FD80610F0E2C9CE01180122096D2D70726F6772616D280932176465636C6172656420627920616E206F70657261746F72');
INSERT INTO "events" VALUES(9,X'0809120C088FA29FD80610F0E2C9CE01180222077363686F6C6172280932176465636C6172656420627920616E206F70657261746F72');
INSERT INTO "events" VALUES(10,X'080A120C088FA29FD80610F0E2C9CE0118022206706F6F6C6564280932176465636C6172656420627920616E206F70657261746F72');
INSERT INTO "events" VALUES(11,X'080B120C088FA29FD80610F0E2C9CE01180522066C6164646572280932176465636C6172656420627920616E206F70657261746F72');
INSERT INTO "events" VALUES(12,X'080C120C088FA29FD80610E0DC99D003220873657474696E6773280A323D73657420627920616E206F70657261746F723A20726F75746573206D6179206E6F742066616C6C206261636B20746F2072656D6F7465206D6F64656C73');
INSERT INTO "events" VALUES(13,X'080D120C0894A29FD80610E0BBB2F802180122036D2D612805321069742077656E7420746F20736C656570');
INSERT INTO "events" VALUES(14,X'080E120B0898A29FD8061088ACC673180122036D2D612806320A697420776F6B65207570');
INSERT INTO "events" VALUES(15,X'080F120B0898A29FD8061088ACC673180122036D2D61280D321969747320656E67696E652074616B6573207265717565737473');
INSERT INTO "events" VALUES(16,X'0810120C08A0A29FD80610C8D7AB8902180122036D2D612804321A7468652072756E6E65722061207361696420676F6F642D627965');
INSERT INTO "events" VALUES(17,X'0811120C08A0A29FD80610C8D7AB890218032201612804321A7468652072756E6E65722061207361696420676F6F642D627965');
CREATE TABLE governance_marks (
	id INTEGER NOT NULL, 
	audience VARCHAR(128) NOT NULL, 
	newest_issued_at DATETIME, 
	CONSTRAINT pk_governance_marks PRIMARY KEY (id)
);
INSERT INTO "governance_marks" VALUES(1,'reg-73eb1b5ca9d3d633d4e87df3',NULL);
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
INSERT INTO "key_pepper" VALUES(1,X'F85A4FB43228F83533F05B5825E9ADBB93DEE20206403EBF0D23A1D932175743');
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
	journal VARCHAR(16), 
	CONSTRAINT pk_mesh_settings PRIMARY KEY (id)
);
INSERT INTO "mesh_settings" VALUES(1,0,2,NULL);
CREATE TABLE models (
	name VARCHAR(128) NOT NULL, 
	pool_name VARCHAR(128) NOT NULL, 
	operations VARCHAR(64) NOT NULL, 
	context_tokens INTEGER NOT NULL, 
	digest VARCHAR(128) NOT NULL, 
	remote BOOLEAN NOT NULL, 
	wake TEXT, 
	skills VARCHAR(64), 
	tags BLOB, 
	upstream TEXT, 
	journal VARCHAR(16), 
	created_at DATETIME NOT NULL, 
	runner VARCHAR(128) NOT NULL, 
	CONSTRAINT pk_models PRIMARY KEY (name), 
	CONSTRAINT fk_models_runner FOREIGN KEY(runner) REFERENCES runners (name) ON DELETE CASCADE
);
INSERT INTO "models" VALUES('m-a','pool','chat,completion,embedding,tokenize',2048,'sha256:5bbc218aef8363d5a98453a3c2cb8724dccfceffb9e163ef142fc238cf944565',0,'{"by_runner": true, "max_wait_seconds": 600.0}',NULL,NULL,'mesh_process.py',NULL,'2026-11-26 06:26:21.384516','a');
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
INSERT INTO "operations" VALUES(1,'op-b65caca9441b5522b946e209','op-e75a1c0c60c776de19c29ef2',X'1A0A08031A067465616D2D61','succeeded','cli:root@vm','[]','a','unspecified','',X'280138004000',0,'2026-11-26 06:26:26.269978','2026-11-26 06:26:26.275239','2026-11-26 06:26:26.328569');
INSERT INTO "operations" VALUES(2,'op-f95f2d8ab6f7654cbd6bfa8f','op-93d9ae9fbbad0b385d00cc28',X'12050A036D2D61','succeeded','cli:root@vm','[]','','unspecified','',X'28014A036D2D61',0,'2026-11-26 06:26:28.659761','2026-11-26 06:26:28.738406','2026-11-26 06:26:28.789829');
INSERT INTO "operations" VALUES(3,'op-36f4d2152d07b4beb33d8f2e','op-ee1c7bd814d7b66a23debcbf',X'0A1E0A036D2D6112170A150A0E636F6E746578745F746F6B656E731203088010','succeeded','cli:root@vm','[]','a','unspecified','',X'1A0610C0B4ACAE034A036D2D61',0,'2026-11-26 06:26:31.140886','2026-11-26 06:26:31.178055','2026-11-26 06:26:32.302705');
CREATE TABLE ownership (
	id INTEGER NOT NULL, 
	owner VARCHAR(64) NOT NULL, 
	address VARCHAR(512), 
	backend_pid INTEGER, 
	beat BIGINT, 
	beat_at DATETIME, 
	CONSTRAINT pk_ownership PRIMARY KEY (id)
);
CREATE TABLE routers (
	name VARCHAR(128) NOT NULL, 
	incarnation VARCHAR(128) NOT NULL, 
	address VARCHAR(512) NOT NULL, 
	version VARCHAR(128) NOT NULL, 
	registered_at DATETIME NOT NULL, 
	CONSTRAINT pk_routers PRIMARY KEY (name)
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
INSERT INTO "runners" VALUES('a','ses-8f58b05f77cce4480f5c3b25','run-62db3da6f9669298919edce4','unix:/tmp/tmp9gp2yma1/home/run/runner-a.sock','vm','llama_server','0.1.0','closed','2026-11-26 06:26:40.549464','2026-11-26 06:26:40.550570',0);
CREATE TABLE secrets (
	name VARCHAR(128) NOT NULL, 
	version BIGINT NOT NULL, 
	key_id VARCHAR(16) NOT NULL, 
	sealed BLOB NOT NULL, 
	created_at DATETIME NOT NULL, 
	updated_at DATETIME NOT NULL, 
	CONSTRAINT pk_secrets PRIMARY KEY (name)
);
CREATE TABLE sessions (
	id VARCHAR(128) NOT NULL, 
	request_id VARCHAR(128) NOT NULL, 
	ticket_key BLOB NOT NULL, 
	CONSTRAINT pk_sessions PRIMARY KEY (id)
);
INSERT INTO "sessions" VALUES('ses-8f58b05f77cce4480f5c3b25','open-f30f09dfb063e5af80a93b04',X'9C963757F9217C5D50C072048D3888C7A47ACDAB890664E080D620517E7EC78F');
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
