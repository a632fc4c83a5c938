-- What operators declare, of every kind, and what runners publish, as messages. documents_migration.py moves the rows.

CREATE TABLE documents (
    -- A kind of resource, such as "alias", or "settings": those of the whole mesh.
    kind VARCHAR(32) NOT NULL,
    name VARCHAR(128) NOT NULL,
    -- How often it was saved.
    revision BIGINT NOT NULL,
    -- Of its tags; empty: it has none.
    owner VARCHAR(128) NOT NULL,
    -- The serialized record, such as an Alias. It may name runners and documents that do not exist: no foreign keys.
    document BYTEA NOT NULL,
    CONSTRAINT pk_documents PRIMARY KEY (kind, name)
);

CREATE TABLE publications (
    kind VARCHAR(32) NOT NULL,
    name VARCHAR(128) NOT NULL,
    runner VARCHAR(128) NOT NULL,
    document BYTEA NOT NULL,
    CONSTRAINT pk_publications PRIMARY KEY (kind, name),
    CONSTRAINT fk_publications_runner FOREIGN KEY(runner) REFERENCES runners (name) ON DELETE CASCADE
);
CREATE INDEX ix_publications_runner ON publications (runner);
