// Which times are seen: all, a window, a step, or while a run goes on its newest steps.

const FOLLOWED = 3; // steps that stay in view
const BEHIND = 1; // seconds that what is followed may lie behind the newest spans, for the sake of its memory
const LEGIBLE = 8; // steps up to which a picture shows all of them at first

class Seen {
  constructor(store) {
    this.store = store;
    this.window = null; // [t0, t1], or null for all there is
    this.room = 0; // seconds to show at least, where several charts share a scale
    this.follow = false; // keep the newest steps in view, or the window's end at the newest span
    this.told = Infinity; // until when the tracks below the lanes are known
    this.most = LEGIBLE; // of more steps than these only the newest are seen, until the reader asks for others
  }

  /** Whether all there is is seen. */
  get whole() {
    return !this.window && !this.follow && this.store.steps.size <= this.most;
  }

  get begin() {
    return Number.isFinite(this.store.begin) ? this.store.begin : 0; // ranks may wait before any has done something
  }

  get end() {
    return Math.max(this.store.end, this.store.begin + this.room);
  }

  get times() {
    const { begin, end } = this;
    if (!(end > begin)) return [0, 1];
    if (this.follow) return this.window ? [end - (this.window[1] - this.window[0]), end] : this.followed;
    return this.window ?? [this.whole ? begin : this.newest[0], end];
  }

  /** The newest steps. The length is that of the longest: it holds still while the newest step grows. */
  get newest() {
    return this.lastOf(this.steps, this.end);
  }

  /** The newest steps of which the tracks are known too, where these come soon: fast steps would leave them empty. */
  get followed() {
    const { steps } = this;
    const known = steps.filter(([start]) => start < this.told);
    const waits = known.length > FOLLOWED && known.length < steps.length && this.end - this.told < BEHIND;
    return waits ? this.lastOf(known, known.at(-1)[1]) : this.newest;
  }

  lastOf(steps, end) {
    if (steps.length <= FOLLOWED) return [this.begin, end];
    const last = steps.slice(-FOLLOWED);
    const longest = Math.max(...steps.slice(-2 * FOLLOWED).map(([from, to]) => to - from));
    return [last[0][0], Math.max(end, last[0][0] + FOLLOWED * longest)];
  }

  /** Each step's [start, end], in order. */
  get steps() {
    return [...this.store.steps].filter(([step]) => step >= 0).map(([, extent]) => extent).sort((a, b) => a[0] - b[0]);
  }

  /** Show t0 to t1, but never nothing: at most all, at least a billionth of it. */
  show(t0, t1) {
    const { begin, end } = this;
    const all = end - begin;
    if (!(all > 0)) return;
    this.most = Infinity;
    const length = Math.max(t1 - t0, all * 1e-9);
    if (length >= all) {
      this.window = null;
    } else {
      const from = Math.min(Math.max(t0, begin), end - length);
      this.window = [from, from + length];
    }
  }

  /** Zoom around the place at this share of the window; while following, around its end. */
  zoom(factor, share) {
    const [t0, t1] = this.times;
    const still = this.follow ? t1 : t0 + share * (t1 - t0);
    this.show(still - (still - t0) * factor, still + (t1 - still) * factor);
  }

  pan(share) {
    const [t0, t1] = this.times;
    this.follow = false;
    this.show(t0 + share * (t1 - t0), t1 + share * (t1 - t0));
  }

  /** Show one step: that after (`by` 1) or before (-1) the one in the middle of what is seen; from all, the first or last. */
  page(by) {
    const { steps } = this;
    if (!steps.length) return;
    const [t0, t1] = this.times;
    const { whole } = this;
    const now = steps.findLastIndex(([start]) => start <= (t0 + t1) / 2);
    const next = whole ? (by > 0 ? 0 : steps.length - 1) : Math.min(Math.max(now + by, 0), steps.length - 1);
    const [start, end] = steps[next];
    this.follow = false;
    this.show(start, end);
  }

  /** Show all there is. */
  fit() {
    this.window = null;
    this.follow = false;
    this.most = Infinity;
  }

  /** A run goes on, or has ended: what was followed stays in view, also when the whole run takes the place of its parts. */
  live(goes) {
    const [t0, t1] = this.times;
    const followed = this.follow && !goes;
    this.follow = Boolean(goes);
    if (followed && !this.window) this.most = FOLLOWED;
    if (followed && this.window && this.end > this.begin) this.window = [t0, t1];
  }
}
