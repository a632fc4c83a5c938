// One stream for all tabs of a browser that have the same caller: the tab that holds a lock leads, reads the stream, and gives it to the
// others. Without locks, as on a page of another machine without TLS, each tab in sight has its own stream.

/**
 * @typedef {{kind: string, change: string, name?: string, object?: any, message?: string}} Update
 * @typedef {{isNew?: boolean, updates?: Update[], state?: string, because?: string}} News What a leader tells: `isNew`: all that it told before
 * is void. `state`: of its stream.
 * @typedef {{lead: (kinds: string[]) => void, rest: () => void, news: (kinds: string[]) => News, take: (news: News) => void}} Part
 * What a tab does: reads a stream of some kinds, ends it, returns what it has of some kinds, or takes what another tab tells.
 */

const BATCH_MILLISECONDS = 50;
const BEAT_MILLISECONDS = 2000;
/** After so long without a word another tab takes the place of the one that leads: it hangs. */
const SILENT_MILLISECONDS = 10_000;

export class Share {
  /** @param {string} name of the caller @param {Part} part */
  constructor(name, part) {
    this.name = `weft.watch ${name}`;
    this.part = part;
    this.id = String(crypto.getRandomValues(new Uint32Array(2)));
    /** What this tab looks at, and of what its stream is. @type {string[]} */
    this.kinds = [];
    /** @type {string[]} */
    this.open = [];
    /** @type {Map<string, {kinds: string[], channel: BroadcastChannel}>} */
    this.followers = new Map();
    this.isLeading = false;
    /** Ends the wait for the lock; null while this tab takes no part. @type {AbortController | null} */
    this.waiting = null;
    /** @type {Update[]} */
    this.batch = [];
    this.release = () => {};
  }

  /** Looks at other kinds; at none: takes no part. @param {string[]} kinds */
  want(kinds) {
    this.kinds = kinds;
    if (!kinds.length) this.leave();
    else if (!this.waiting) this.join();
    else if (this.isLeading) this.read();
    else this.ask();
  }

  join() {
    this.waiting = new AbortController();
    if (!navigator.locks) return this.lead();
    this.all = new BroadcastChannel(this.name);
    this.own = new BroadcastChannel(`${this.name} ${this.id}`);
    this.all.onmessage = ({ data }) => this.hear(data);
    this.own.onmessage = ({ data }) => {
      this.heard = Date.now();
      if (!this.isLeading) this.part.take(data);
    };
    this.heard = Date.now();
    this.beats = setInterval(() => this.beat(), BEAT_MILLISECONDS);
    this.wait({ signal: this.waiting.signal });
    this.ask();
  }

  /** Leads as soon as the lock is free. @param {LockOptions} options */
  wait(options) {
    const { waiting } = this;
    const held = () =>
      new Promise((resolve) => {
        if (waiting !== this.waiting) return resolve(null);
        this.release = () => resolve(null);
        this.lead();
      });
    navigator.locks.request(this.name, options, held).catch(() => {
      // Another tab has taken the lock.
      if (waiting !== this.waiting || !waiting) return;
      this.rest();
      this.wait({ signal: waiting.signal });
      this.ask();
    });
  }

  lead() {
    this.isLeading = true;
    this.read();
    this.all?.postMessage({ asks: true });
  }

  rest() {
    this.isLeading = false;
    this.open = [];
    for (const { channel } of this.followers.values()) channel.close();
    this.followers.clear();
    this.part.rest();
  }

  leave() {
    if (!this.waiting) return;
    this.all?.postMessage({ tab: this.id, kinds: [] });
    this.waiting.abort();
    this.waiting = null;
    this.all?.close();
    this.own?.close();
    clearInterval(this.beats);
    this.rest();
    this.release();
  }

  /** Says what this tab looks at. */
  ask() {
    this.all?.postMessage({ tab: this.id, kinds: this.kinds });
  }

  /** @param {{asks?: boolean, tab: string, kinds: string[]}} message of another tab */
  hear({ asks, tab, kinds }) {
    if (!this.isLeading) return asks && this.ask();
    if (asks) return;
    const known = this.followers.get(tab);
    if (!kinds.length) {
      known?.channel.close();
      this.followers.delete(tab);
      return;
    }
    const channel = known?.channel ?? new BroadcastChannel(`${this.name} ${tab}`);
    this.flush();
    this.followers.set(tab, { kinds, channel });
    if (kinds.every((kind) => this.open.includes(kind))) channel.postMessage({ ...this.part.news(kinds), isNew: true });
    // Many ask together where the leader is new.
    else this.due ??= setTimeout(() => this.read(), BATCH_MILLISECONDS);
  }

  /** Opens the stream again if it has not what is looked at; for one tab alone also if it has more. */
  read() {
    this.due = void clearTimeout(this.due);
    if (!this.isLeading) return;
    const kinds = [...new Set([this.kinds, ...[...this.followers.values()].map((each) => each.kinds)].flat())].sort();
    if (kinds.every((kind) => this.open.includes(kind)) && (this.followers.size || kinds.length === this.open.length)) return;
    this.open = kinds;
    this.part.lead(kinds);
  }

  /** Gives an update to the tabs that look at its kind. @param {Update} update */
  give(update) {
    if (!this.followers.size) return;
    this.batch.push(update);
    this.flushes ??= setTimeout(() => this.flush(), BATCH_MILLISECONDS);
  }

  flush() {
    this.flushes = void clearTimeout(this.flushes);
    for (const { kinds, channel } of this.followers.values()) {
      const updates = this.batch.filter(({ kind }) => kinds.includes(kind));
      if (updates.length) channel.postMessage({ updates });
    }
    this.batch = [];
  }

  /** @param {News} news for all */
  tell(news) {
    this.flush();
    for (const { channel } of this.followers.values()) channel.postMessage(news);
  }

  beat() {
    if (this.isLeading) this.tell({});
    else if (Date.now() - (this.heard ?? 0) > SILENT_MILLISECONDS) {
      this.heard = Date.now();
      this.waiting?.abort();
      this.waiting = new AbortController();
      this.wait({ steal: true });
    }
  }
}
