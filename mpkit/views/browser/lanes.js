// Which lanes are shown and where: a rank's rows below each other, ranks of a group below its header; a folded group
// shows its first rank's lane. A group is {heading, folded_heading, first, count, folded}, as lanes.py makes them.

const HEIGHTS = { compute: 28, layers: 8, comm: 8, host: 6, data: 8 };
const SPACE = { between: 8, within: 2, top: 6, marks: 18, axis: 24, head: 20, most: 720 };

class Lanes {
  constructor() {
    Object.assign(this, { groups: [], folded: new Set(), known: "[]" });
  }

  /** Take the groups; what is folded stays as it is while they are the same. */
  take(groups) {
    const known = JSON.stringify(groups);
    if (known === this.known) return;
    this.known = known;
    this.groups = groups;
    this.folded = new Set(groups.flatMap((group, i) => (group.folded && group.count > 1 ? [i] : [])));
  }

  /** Those that folding makes a difference to. */
  get foldable() {
    return this.groups.flatMap((group, i) => (group.count > 1 ? [i] : []));
  }

  get allFolded() {
    return this.foldable.length > 0 && this.foldable.every((i) => this.folded.has(i));
  }

  toggle(i) {
    if (this.groups[i].count > 1 && !this.folded.delete(i)) this.folded.add(i);
  }

  toggleAll() {
    this.folded = new Set(this.allFolded ? [] : this.foldable);
  }

  /** [[group or -1, its ranks that are shown], ...] */
  shown(ranks) {
    if (!this.groups.length) return [[-1, Array.from({ length: ranks }, (_, rank) => rank)]];
    return this.groups.map(({ first, count }, i) => {
      return [i, Array.from({ length: this.folded.has(i) ? 1 : count }, (_, at) => first + at)];
    });
  }

  /** Rows and headers with y and height in CSS pixels; many ranks get thinner rows, so that all are seen. */
  layout(ranks, parts, marked) {
    const shown = this.shown(Math.max(ranks, 1));
    const lanes = shown.reduce((sum, [, some]) => sum + some.length, 0);
    const each = parts.reduce((sum, part) => sum + HEIGHTS[part] + SPACE.within, SPACE.between);
    const thin = Math.min(1, Math.max(SPACE.most / (lanes * each), 0.12));
    const rows = [];
    const heads = [];
    let y = SPACE.top + (marked ? SPACE.marks : 0);
    const top = y;
    for (const [group, some] of shown) {
      if (group >= 0) {
        heads.push({ group, y, height: SPACE.head });
        y += SPACE.head;
      }
      for (const [at, rank] of some.entries()) {
        for (const part of parts) {
          rows.push({ rank, part, at, y, height: HEIGHTS[part] * thin });
          y += (HEIGHTS[part] + SPACE.within) * thin;
        }
        y += SPACE.between * thin;
      }
    }
    return { rows, heads, top, bottom: y, height: y + SPACE.axis, thin };
  }

  drawLabels({ context, ratio, left, theme, labels, selected }, { rows, thin }) {
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillStyle = theme.text;
    const every = Math.ceil(0.5 / thin); // of thin rows, label some
    for (const { rank, part, at, y, height } of rows) {
      if (part !== "compute" || (at % every !== every >> 1 && rank !== selected)) continue;
      context.font = `${12 * ratio}px ${FONT}`;
      context.fillText(labels[rank] ?? "", left - 8 * ratio, (y + height / 2) * ratio);
    }
  }

  /** A triangle, what the group is, and a line from there to the end. */
  drawHeads({ context, ratio, left, width, theme }, { heads }) {
    context.font = `600 ${11 * ratio}px ${FONT}`;
    context.textAlign = "left";
    context.textBaseline = "middle";
    for (const { group, y, height } of heads) {
      const { heading, folded_heading, count } = this.groups[group];
      const folded = this.folded.has(group);
      const middle = (y + height / 2 - 2) * ratio;
      context.fillStyle = theme.faint;
      if (count > 1) triangle(context, 8 * ratio, middle, 4 * ratio, folded);
      const words = folded ? folded_heading : heading;
      const after = (16 + 8) * ratio + context.measureText(words).width;
      context.fillText(words, 16 * ratio, middle);
      context.strokeStyle = theme.line;
      context.lineWidth = ratio;
      context.beginPath();
      context.moveTo(after, middle);
      context.lineTo(Math.max(left + width, after), middle);
      context.stroke();
    }
  }
}

/** It points to the right where something is folded, and down where not. */
function triangle(context, x, y, size, folded) {
  const points = folded ? [[-0.6, -1], [0.8, 0], [-0.6, 1]] : [[-1, -0.6], [1, -0.6], [0, 0.8]];
  context.beginPath();
  for (const [dx, dy] of points) context.lineTo(x + dx * size, y + dy * size);
  context.fill();
}
