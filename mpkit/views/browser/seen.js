// Which times are seen: all, a window, a step, or while a run goes on its newest steps.

const FOLLOWED = 3; // steps that stay in view

class Seen {
  constructor(store) {
    this.store = store;
    this.window = null; // [t0, t1], or null for all there is
    this.room = 0; // seconds to show at least, where several charts share a scale
    this.follow = false; // keep the newest steps in view, or the window's end at the newest span
  }

  get begin() {
    return this.store.begin;
  }

  get end() {
    return Math.max(this.store.end, this.store.begin + this.room);
  }

  get times() {
    const { begin, end } = this;
    if (!(end > begin)) return [0, 1];
    if (this.follow) return this.window ? [end - (this.window[1] - this.window[0]), end] : this.newest;
    return this.window ?? [begin, end];
  }

  /** The newest steps. The length is that of the longest: it holds still while the newest step grows. */
  get newest() {
    const { begin, end } = this;
    const steps = this.steps;
    if (steps.length <= FOLLOWED) return [begin, end];
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
    const whole = end - begin;
    if (!(whole > 0)) return;
    const length = Math.max(t1 - t0, whole * 1e-9);
    if (length >= whole) {
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
    const whole = !this.window && !this.follow;
    const now = steps.findLastIndex(([start]) => start <= (t0 + t1) / 2);
    const next = whole ? (by > 0 ? 0 : steps.length - 1) : Math.min(Math.max(now + by, 0), steps.length - 1);
    const [start, end] = steps[next];
    this.follow = false;
    this.show(start, end);
  }

  /** A run has ended, or goes on: what was followed stays in view. */
  live(goes) {
    if (!goes && this.follow) {
      const [t0, t1] = this.times;
      this.follow = false;
      this.show(t0, t1);
    }
    this.follow = Boolean(goes);
  }
}
