-- How many further turns the conversations of a pool have, which decides whether their prompts are worth a wait.
CREATE TABLE further_turns (
    router VARCHAR(128) NOT NULL,
    pool VARCHAR(256) NOT NULL,
    share DOUBLE PRECISION NOT NULL,
    prompts DOUBLE PRECISION NOT NULL,
    saved_at DOUBLE PRECISION NOT NULL,
    CONSTRAINT pk_further_turns PRIMARY KEY (router, pool)
);
